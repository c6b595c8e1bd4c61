"""The meaning of checkers' names, for readers of a report who do not know the harness."""

#: Checker -> what must be so; it fails where it is not.
CHECKERS = {
    "agrees_with_native": "Whatever torch's DDP showed in this scenario, the DDP under test shows as well.",
    "broadcast_before_forward": "A forward broadcasts buffers, all from one rank, before it does anything else.",
    "bucket_order": "After the first step every backward reduces the same buckets in the same order.",
    "device_is_content": "The device found nothing wrong in what it was told to do, such as a race.",
    "does_not_interfere": "Nothing but the DDP's own business changed: no modes, no random states, not the module.",
    "exercised": "The scenario did what it is for: every rank reported, and faults and collectives took place.",
    "facts": "What each rank saw (gradients, parameters, buffers, exceptions) is what the requirement demands.",
    "leaves_no_process": "No rank keeps a process that it started: such a process may hold connections and devices.",
    "leaves_no_trace": "No rank's process is other than before when it is done: no hooks, no changed settings.",
    "no_broadcast_in_forward": "A forward of a model without buffers to share broadcasts nothing.",
    "no_crash": "No rank's process died.",
    "no_exception": "No rank raised an exception where none is demanded.",
    "no_hang": "Every rank came to its end in time; where one did not, the finding names the ranks it waited for.",
    "nothing_in_flight": "At the end every collective was waited for and is complete.",
    "no_gradients_in_flight": "At the end every collective of gradients was waited for, unless some rank raised.",
    "refuses_together": "Where one rank refuses with an exception, all do.",
    "same_collectives": "All ranks of a group issued matching collectives in the same order.",
    "one_order": "All ranks of a group issued matching collectives in the same order, whoever issued them.",
    "same_number_each_step": "After the first step every backward takes the same number of collectives.",
    "same_until_refused": "Ranks issued matching collectives, up to where they refused.",
    "silent_no_sync": "Inside no_sync no backward communicates gradients.",
}

_WAIT = "Wait for every Work before backward returns, and before the program ends."
_ONE_ORDER = "Let what a rank issues next follow from what all ranks know, never from which gradients came, or when."
#: Checker -> what a DDP does wrong where it fails, and what to do; of checkers whose failure means one thing.
MISTAKES_BY_CHECKER = {
    "same_collectives": ("Ranks issue different collectives.", _ONE_ORDER),
    "same_until_refused": ("Ranks issue different collectives.", _ONE_ORDER),
    "one_order": ("Ranks issue different collectives.", _ONE_ORDER),
    "silent_no_sync": (
        "Gradients are communicated inside `no_sync`.",
        "Let a backward whose forward ran under `no_sync` accumulate, and reduce nothing.",
    ),
    "nothing_in_flight": ("Nobody waits for a collective.", _WAIT),
    "no_gradients_in_flight": ("Nobody waits for a collective of gradients.", _WAIT),
    "bucket_order": ("Buckets are reduced in an order that changes.", "Launch buckets in the order of their index."),
    "same_number_each_step": (
        "Backwards take a changing number of collectives.",
        "Clear what counts gradients at the end of every backward.",
    ),
    "broadcast_before_forward": (
        "Buffers are not broadcast first in forward, or not all from one rank.",
        "Broadcast them from rank 0 before the module runs.",
    ),
    "no_broadcast_in_forward": (
        "A forward broadcasts though there is nothing to share.",
        "Broadcast nothing without buffers, or with `broadcast_buffers=False`.",
    ),
    "leaves_no_trace": (
        "A rank's process is not left as it was.",
        "Remove hooks, threads and settings when the wrapper is dropped.",
    ),
    "leaves_no_process": ("A rank keeps a process that it started.", "End it with the wrapper."),
    "does_not_interfere": (
        "Something that is not the DDP's own is changed.",
        "Leave modes, random states and the module as they were.",
    ),
    "refuses_together": (
        "Some ranks refuse, and others go on.",
        "Agree on the refusal between ranks before any of them raises.",
    ),
}
