"""What a rank wrote down can be read by somebody else, whatever became of the rank."""

from dataclasses import replace
from pathlib import Path

from conformance.observation import Collective
from conformance.recorder.flight_record import NUM_SLOTS, FlightRecord, read_flight


def collective(index: int, num_tensors: int = 1) -> Collective:
    return Collective(
        index, "all_reduce", "default", ((index, 3),) * num_tensors, ("float32",) * num_tensors, "sum", -1,
        "backward", 2, False, False, 17,
    )  # fmt: skip


def test_phase_and_collectives_are_read_back(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    record = FlightRecord(path)
    record.entered("backward", 2, False)
    for index in range(3):
        record.issued(collective(index))
    record.fault_fires()
    seen = read_flight(path)
    assert (seen.phase, seen.step, seen.num_collectives, seen.faults_fired) == ("backward", 2, 3, 1)
    assert seen.collectives == tuple(map(collective, range(3)))


def test_start_forgets(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    record = FlightRecord(path)
    record.issued(collective(0))
    record.fault_fires()
    record.start()
    seen = read_flight(path)
    assert (seen.phase, seen.step, seen.faults_fired, seen.collectives) == ("start", -1, 0, ())


def test_the_last_collectives_stay(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    record = FlightRecord(path)
    for index in range(NUM_SLOTS + 10):
        record.issued(collective(index))
    seen = read_flight(path)
    assert seen.num_collectives == NUM_SLOTS + 10
    assert [one.index for one in seen.collectives] == list(range(10, NUM_SLOTS + 10))


def test_of_very_many_tensors_the_number_of_elements_stays(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    many = collective(4, num_tensors=500)
    FlightRecord(path).issued(many)
    (seen,) = read_flight(path).collectives
    assert seen.numel == many.numel
    assert seen.dtypes == ("float32",)


def test_of_very_many_members_nobody_is_named(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    FlightRecord(path).issued(replace(collective(4), members=tuple(range(1000))))
    assert read_flight(path).collectives == (replace(collective(4), shapes=((12,),)),)


def test_long_names_of_phases_are_cut(tmp_path: Path) -> None:
    path = str(tmp_path / "record")
    FlightRecord(path).entered("x" * 200, 0, True)
    assert read_flight(path).phase == "x" * 160


def test_a_rank_that_did_not_come_so_far_has_no_record(tmp_path: Path) -> None:
    assert read_flight(str(tmp_path / "missing")).collectives == ()
