"""`Subject`: the DDP under test, by name.

A `Subject` names an implementation as text (`module:attr`), and each rank imports it for itself. The harness therefore
never holds a reference to a DDP class outside the ranks.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from conformance import plugins
from conformance.errors import SubjectError, hint

if TYPE_CHECKING:  # commands that print a finished report need no torch
    from torch import nn

#: What a subject may declare, and scenarios may list under `needs`, beyond what every DDP must do.
CAPABILITIES = frozenset({
    "auto_buckets", "bucket_cap_mb", "bucket_cap_mb_list", "cast_forward_inputs", "comm_hook", "delay_all_reduce",
    "device_mesh", "find_unused_parameters", "full_precision_modules", "gradient_as_bucket_view",
    "ignored_parameters", "init_sync", "join", "lazy_bucket_allocation", "logging_data", "manual_finalization",
    "mixed_precision", "no_sync", "optimizer_in_backward", "pickling", "replicated_parameters",
    "skip_all_reduce_unused_params", "sparse_gradients", "static_graph", "update_process_group",
})  # fmt: skip


#: Optional options of a DDP with torch's defaults: a scenario that passes another value is UNSUPPORTED if the subject's
#: signature lacks the option.
DEFAULTS: Mapping[str, Any] = {
    "batched_grad_copy": False, "broadcast_buffers": None, "bucket_cap_mb": None, "bucket_cap_mb_list": None,
    "check_reduction": False, "delay_all_reduce_named_params": None, "device_ids": None, "device_mesh": None,
    "find_unused_parameters": False, "forward_sync_buffers": None, "gradient_as_bucket_view": False,
    "init_sync": True, "lazy_bucket_allocation": False, "mixed_precision": None, "output_device": None,
    "param_to_hook_all_reduce": None, "skip_all_reduce_unused_params": False, "static_graph": False,
}  # fmt: skip


#: Methods and class attributes of a DDP -> the capability that they belong to.
METHODS = {
    "_get_ddp_logging_data": "logging_data",
    "_register_buffer_comm_hook": "comm_hook",
    "_register_builtin_comm_hook": "comm_hook",
    "_register_fused_optim": "optimizer_in_backward",
    "_set_ddp_runtime_logging_sample_rate": "logging_data",
    "_set_params_and_buffers_to_ignore_for_model": "ignored_parameters",
    "_set_static_graph": "static_graph",
    "_update_process_group": "update_process_group",
    "join": "join",
    "join_hook": "join",
    "no_sync": "no_sync",
    "register_comm_hook": "comm_hook",
}


@dataclass(frozen=True, slots=True)
class Subject:
    """A DDP under test: `target` is `module:attr`, `capabilities` what it claims to support.

    By default a subject claims every capability: a false claim shows as a FAIL, a missing claim would hide it. `source`
    is the text that a user typed for it, if that is not `name`.
    """

    name: str
    target: str
    capabilities: frozenset[str] = CAPABILITIES
    source: str = ""

    def __post_init__(self) -> None:
        """Raise `SubjectError` for an unknown capability, which would hide a capability that a scenario needs."""
        for unknown in sorted(self.capabilities - CAPABILITIES):
            raise SubjectError(f"DDP {self.name!r}: unknown capability {unknown!r}{hint(unknown, CAPABILITIES)}")

    @property
    def typed(self) -> str:
        """The argument of `--ddp` for this subject; empty if it is no DDP."""
        return self.source or (self.name if self.is_ddp else "")

    @property
    def is_ddp(self) -> bool:
        """Whether there is a class to wrap a module in."""
        return bool(self.target)


#: The subject of ranks that compute the truth, whose program wraps nothing.
NO_DDP = Subject("none", "", frozenset())


def by_itself(backend: str) -> Subject:
    """Return the subject of a run that judges a backend without a DDP: it has the backend's name."""
    return dataclasses.replace(NO_DDP, name=backend)


KNOWN = {
    "ddp_impl": Subject("ddp_impl", "ddp_impl:DistributedDataParallel"),
    # torch's mixed precision lists its two missing settings as future work. A view of parameters as replicated tensors
    # was proposed for torch and dropped. torch's bucket caps are numbers only.
    "torch": Subject(
        "torch",
        "torch.nn.parallel:DistributedDataParallel",
        CAPABILITIES - {"auto_buckets", "cast_forward_inputs", "full_precision_modules", "replicated_parameters"},
    ),
}


def get_subject(text: str) -> Subject:
    """Return the subject called `text`, and import it in this process. The controller calls `find_subject` instead.

    `text` is as for `named`; an entry point and `module:attr` may also name a `Subject`. Raises as `named` and `load`.
    """
    subject = named(text)
    if subject not in KNOWN.values() and isinstance(described := _attribute(subject), Subject):
        subject = dataclasses.replace(described, source=text)
    load(subject)
    return subject


def named(text: str) -> Subject:
    """Return the subject that `text` names, without an import; it claims every capability unless it is of `KNOWN`.

    `text` is `ddp_impl`, `torch`, the name of an entry point of the group `ddp_conformance.subjects`, or
    `module:Class`; raises `SubjectError` for another text.
    """
    known = {**KNOWN, **{subject.target: subject for subject in KNOWN.values()}}  # `module:Class` gives the same report
    if text in known:
        return known[text]
    target = plugins.target_of(plugins.SUBJECTS, text, SubjectError)
    if target := target or (text if re.fullmatch(r"[\w.]+:[\w.]+", text) else ""):
        return Subject(text, target)
    names = list(dict.fromkeys((*KNOWN, *(plugin.name for plugin in plugins.installed(plugins.SUBJECTS)))))
    near = difflib.get_close_matches(text, names, n=1)
    advice = f"did you mean {near[0]}?" if near else f"expected {', '.join(names)}, or module:Class"
    raise SubjectError(f"unknown DDP {text!r}; {_as_module(text) or advice}")


def _as_module(text: str) -> str:
    """Return advice for a `text` that is a file's path or lacks the class; empty for other texts."""
    path, _, name = text.partition(":")
    module = path.removesuffix(".py").strip("./").replace("/", ".")
    if re.fullmatch(r"\w+(\.\w+)*", module) is None or (path == module and ":" not in text):
        return ""
    return f"write {module}:{name or 'Class'}, the module by its dotted name and the class in it"


def load(subject: Subject) -> Callable[..., nn.Module]:
    """Import the subject's class in this process; raises `SubjectError` if that fails, or it cannot be called."""
    found = _attribute(subject)
    if not callable(found):
        raise SubjectError(f"DDP {subject.name!r}: {subject.target} must be a class, got {type(found).__name__}")
    return found


def capabilities_of(options: Mapping[str, Any]) -> frozenset[str]:
    """Return the capabilities that these options of a DDP need; an option at its default needs none."""
    asked = {name for name, value in options.items() if not _is_default(name, value)}
    if options.get("bucket_cap_mb") == "auto":
        asked = asked - {"bucket_cap_mb"} | {"auto_buckets"}
    return CAPABILITIES & asked


def given_options(subject: Callable[..., nn.Module], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the `options` in the signature of `subject`, and others that are not at their defaults.

    So a DDP without an option need not accept its default, not even by `**kwargs`.
    """
    named = _parameters(subject)
    if named is None:
        return dict(options)
    return {name: value for name, value in options.items() if name in named or not _is_default(name, value)}


def refused_options(subject: Callable[..., nn.Module], options: Iterable[str]) -> tuple[str, ...]:
    """Return the `options` that torch or `ddp_impl` has and the signature of `subject` lacks.

    A subject with `**kwargs`, or without a signature in Python, lacks none. Requirements are about names that no DDP
    has. Every subject must take `process_group`.
    """
    named = _parameters(subject)
    if named is None or any(parameter.kind is parameter.VAR_KEYWORD for parameter in named.values()):
        return ()
    return tuple(name for name in options if name in DEFAULTS and name not in named)


def takes(subject: Subject, option: str) -> bool:
    """Whether the subject's signature has `option`, of torch or `ddp_impl`, and it does not deny the capability.

    Raises as `load` does.
    """
    undeclared = CAPABILITIES - subject.capabilities
    return option not in undeclared and not refused_options(load(subject), (option,))


def swallows(subject: Subject, option: str) -> bool:
    """Whether the subject takes `option`, of torch or `ddp_impl`, only by `**kwargs`; raises as `load` does."""
    named = _parameters(load(subject)) or {}
    return option in DEFAULTS and option not in named and any(one.kind is one.VAR_KEYWORD for one in named.values())


def _is_default(name: str, value: Any) -> bool:
    return name in DEFAULTS and value is DEFAULTS[name]


def _parameters(subject: Callable[..., nn.Module]) -> Mapping[str, inspect.Parameter] | None:
    try:
        return inspect.signature(subject).parameters
    except (TypeError, ValueError):
        return None


def _attribute(subject: Subject) -> object:
    module_name, _, attribute = subject.target.partition(":")
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        raise SubjectError(
            f"DDP {subject.name!r}: cannot import {module_name}: {type(error).__name__}: {error}"
        ) from error
    found: object = module
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=1)
            advice = f"; did you mean {near[0]}?" if near else ""
            raise SubjectError(f"DDP {subject.name!r}: {module_name} has no attribute {attribute}{advice}")
        found = getattr(found, part)
    return found
