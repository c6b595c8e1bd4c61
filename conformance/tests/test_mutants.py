"""Every mutant is told from what it was made from by a requirement that it breaks; what it was made from is not."""

import importlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch.nn.parallel
from click.testing import CliRunner

import ddp_impl
from conformance.backends import backend
from conformance.backends.backend import UNKNOWN_TO_TORCH, get_backend
from conformance.cli import main
from conformance.mutants import detector as detector_of_mutants
from conformance.mutants.catalogue import Kill, Mutant, chosen, load_deviations, load_mutants
from conformance.mutants.detector import Detection, Detector, Fate, Found, of_newer_torch, scenarios_of
from conformance.spec.catalogue import load_catalogue
from conformance.workers.zygote_process import ZygoteProcess

CATALOGUE = load_catalogue()
MUTANTS = load_mutants()
DDPS = {"torch": torch.nn.parallel.DistributedDataParallel, "ddp_impl": ddp_impl.DistributedDataParallel}
#: Mutants that hold a DDP, because what they break is that they are none.
HOLDS_ONE = {"IsNoTorchDDP"}
#: Ranks of these wait for each other until a deadline, or are tried in many scenarios.
SLOW = {
    "JoinedRanksKeepFirstBuckets", "LeavesWithItsLastGradient", "keeps_descriptors", "drops_the_timeout",
    "is_wrong_at_one_mebibyte", "leaves_out_the_last_rank", "keeps_threads", "CopiesListsByKernels",
    "keeps_a_descriptor_of_barriers",
}  # fmt: skip
#: As all of these chapters do.
SLOW_CHAPTERS = {"fates", "timeouts"}


def named(name: str) -> Mutant:
    (mutant,) = [mutant for mutant in MUTANTS if mutant.name == name]
    return mutant


def pairs() -> list[Any]:
    """Return every mutant with the first requirement that tells it; compiled modules have tests of their own.

    The first of each quick chapter is told at every push, the others in the nightly. `ddp-conformance mutants` runs all
    pairs; so does a job of the workflow. What the installed torch lacks has no mutants here: that command names them.
    """
    firsts = [
        (mutant, mutant.kills[0], CATALOGUE.requirement(mutant.kills[0].requirement))
        for mutant in (*MUTANTS, load_deviations())
    ]
    of_every_push: dict[str, Mutant] = {}
    newer = of_newer_torch(MUTANTS)
    for mutant, _, requirement in firsts:
        is_slow = mutant.name in SLOW or requirement.chapter in SLOW_CHAPTERS
        if requirement.level in ("core", "full", "backend") and not is_slow:
            of_every_push.setdefault(requirement.chapter, mutant)
    return [
        pytest.param(mutant, kill, marks=() if mutant in of_every_push.values() else pytest.mark.nightly)
        for mutant, kill, requirement in firsts
        if requirement.level != "compiled" and not newer.get(mutant.name, frozenset()) & UNKNOWN_TO_TORCH
    ]


@pytest.fixture(scope="module")
def detector(zygote: ZygoteProcess) -> Iterator[Detector]:
    with Detector(zygote) as detector:
        yield detector


@pytest.mark.parametrize(
    ("mutant", "kill"), pairs(), ids=lambda value: value.name if isinstance(value, Mutant) else value.where
)
def test_a_mutant_is_detected_by_the_requirement_that_it_breaks(detector: Detector, mutant: Mutant, kill: Kill) -> None:
    detection = detector.detect(mutant, kill)
    assert detection.is_as_expected, f"{mutant.bug}: {detection.fate.value} {kill.requirement}"


#: What a DDP changes besides values, what it leaves behind, and the current device: every scenario is judged by them.
EVERYWHERE = {"COMPOSED-02", "COMPAT-12", "DEV-13"}


def is_noticed_everywhere(mutant: Mutant) -> bool:
    """Whether every scenario notices it; a backend that is wrong may be unable to train at all."""
    levels = {CATALOGUE.requirement(kill.requirement).level for kill in mutant.kills}
    return "backend" in levels or any(kill.requirement in EVERYWHERE for kill in mutant.kills)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if not is_noticed_everywhere(mutant)], ids=lambda mutant: mutant.name
)
def test_a_mutant_is_broken_in_one_way_only(detector: Detector, mutant: Mutant) -> None:
    assert detector.spoilt(mutant) == []


@pytest.mark.parametrize("base", [pytest.param("torch", marks=pytest.mark.nightly), "ddp_impl"])
def test_who_is_not_wrong_is_neither_killed_nor_active(detector: Detector, base: str) -> None:
    unchanged = Mutant("unchanged", base, base, (Kill("BUFFER-09"),))
    assert detector.detect(unchanged, unchanged.kills[0]).fate is Fate.INACTIVE


def test_what_its_base_fails_as_well_kills_nobody(detector: Detector) -> None:
    deviation = next(kill for kill in load_deviations().kills if kill.requirement == "STATIC-17")
    assert detector.detect(load_deviations(), deviation).fate is Fate.KILLED
    assert detector.detect(Mutant("unchanged", "torch", "torch", (deviation,)), deviation).fate is not Fate.KILLED


@pytest.mark.nightly
def test_a_mutant_survives_where_it_is_active_and_nothing_is_wrong(detector: Detector) -> None:
    """More buckets are seen, and no requirement about mere values minds."""
    assert detector.detect(named("OneBucket"), Kill("BUCKET-08")).fate is Fate.SURVIVED


def test_evidence_must_be_in_the_explanation(detector: Detector) -> None:
    assert (
        detector.detect(named("NoDivision"), Kill("gradients/GRAD-01/mlp-world2", "a word that nobody says")).fate
        is Fate.SURVIVED
    )


def unlike_the_catalogue(mutant: Mutant) -> bool:
    """Whether a mutant is of another base than is said, has no words, or breaks nothing that there is."""
    module, _, attribute = mutant.target.partition(":")
    if mutant.of == "gloo":
        derives = get_backend(mutant.target).create is not get_backend("gloo").create
    else:
        derives = issubclass(getattr(importlib.import_module(module), attribute), DDPS[mutant.of])
    breaks = [kill.requirement in CATALOGUE and scenarios_of(kill.where) for kill in mutant.kills]
    return not (mutant.bug and breaks and all(breaks) and (derives or attribute in HOLDS_ONE))


def test_the_catalogue_says_what_is() -> None:
    assert [mutant.name for mutant in MUTANTS if unlike_the_catalogue(mutant)] == []
    assert unlike_the_catalogue(replace(named("NoDivision"), of="ddp_impl"))
    assert unlike_the_catalogue(replace(named("NoDivision"), kills=(Kill("GRAD-99"),)))


@pytest.mark.parametrize(
    ("names", "ran"), [(["NoDivision", "rounds_its_factor"], {"NoDivision"}), (["--newer", "rounds_its_factor"], set())]
)
def test_mutants_of_what_the_installed_torch_lacks_are_left_out_and_named(
    names: list[str], ran: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detector_of_mutants, "OF_NEWER_TORCH", {"premul_sum": "a method"})
    monkeypatch.setattr(backend, "UNKNOWN_TO_TORCH", {"premul_sum"})

    def killed(mutants: tuple[Mutant, ...], *_: Any, **__: Any) -> Found:
        assert {mutant.name for mutant in mutants} == ran
        return Found(tuple(Detection(one, kill, Fate.KILLED) for one in mutants for kill in one.kills))

    monkeypatch.setattr(detector_of_mutants, "detect_all", killed)
    done = CliRunner().invoke(main, ["mutants", *names])
    assert done.exit_code == (0 if ran else 2)
    assert "has no premul_sum, so these mutants are left out: rounds_its_factor" in done.output


def test_the_mutants_of_what_not_every_torch_has_are_those_that_need_it() -> None:
    found = of_newer_torch(map(named, ("joins_the_root_first", "joins_backwards")))
    assert found == {"joins_the_root_first": {"gather_single"}}


def test_names_and_profiles_choose_among_the_mutants() -> None:
    core = chosen((), "core", CATALOGUE)
    assert {CATALOGUE.requirement(kill.requirement).level for mutant in core for kill in mutant.kills} == {"core"}
    (one,) = chosen(("NoDivision",), "", CATALOGUE)
    assert one == named("NoDivision")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["NoDivison"], "unknown mutant 'NoDivison'; did you mean NoDivision?"),
        (["--profile", "coer"], "unknown profile 'coer'; did you mean core?"),
        (["--chapter", "composed", "--profile", "gpu"], "no mutant"),
        (["--chapter", "telemtry"], "unknown chapter 'telemtry'; did you mean telemetry?"),
        (["NoDivision", "--out", "page.md"], "--out writes about all mutants"),
        (["--into", "page.md"], "--into renews all that a file says of some mutants; name them, a --chapter"),
        (["NoDivision", "--profile", "core", "--into", "page.md"], "--chapter or --newer, and no --profile"),
        (["--newer", "--out", "page.md"], "--out writes about all mutants"),
        (["NoDivision", "--into", "no/page.md"], "cannot read no/page.md: No such file or directory; --out writes it"),
        (["NoDivision", "--into", __file__], "this is no file of what was detected"),
    ],
)
def test_a_mistaken_question_is_refused(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(main, ["mutants", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.nightly
def test_the_command_says_who_killed_whom() -> None:
    result = CliRunner().invoke(main, ["mutants", "NoDivision", "BackwardGather"])
    assert result.exit_code == 0, result.output
    assert "1 of 2 mutants killed, 1 survived, 0 not active; 2 of 2 expected kills seen." in result.stdout
    assert "killed      NoDivision, GRAD-01" in result.stderr


def test_a_detected_control_makes_kills_void(detector: Detector) -> None:
    """A subclass that has a bug stands for one that a requirement wrongly fails."""
    mutant = named("NoDivision")
    kill = detector.detect(mutant, mutant.kills[0])
    assert list(detector.false_alarms([kill])) == []
    wrong = type("Wrong", (Mutant,), {"control": mutant.trial})(mutant.name, mutant.target, mutant.of, mutant.kills)
    (alarm,) = detector.false_alarms([replace(kill, mutant=wrong)])
    assert alarm.startswith(
        f"{kill.scenario_id} gives conformance.chapters.gradients.mutants:NoDivision on gloo the verdict FAIL"
    )
