"""What the names of checkers mean, for readers of a report who do not know the harness."""

from __future__ import annotations

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
