"""Known mistakes of a DDP, by name: what it does wrong, and what to do.

The rules that recognise them need tensors; pages of a report need these sentences alone.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in words; a `secondary` one is a consequence of others and reported after them."""

    title: str
    remedy: str
    secondary: bool = False


MISTAKES = {
    "wrong-dtype": Mistake("A value has the wrong dtype.", "Cast to the dtype that the requirement names."),
    "wrong-layout": Mistake(
        "A value has the wrong layout.",
        "Keep the layout, dense or sparse, of the gradient that the module's own backward gives.",
    ),
    "wrong-shape": Mistake(
        "A value has the wrong shape.",
        "Copy the result of the reduction back with its own shape, in the bucket's one order.",
    ),
    "not-finite": Mistake(
        "Values overflow or become not-a-number.",
        "Divide before the sum where its range is too small, and initialise every buffer that is reduced.",
    ),
    "no-sync-left-out": Mistake(
        "Gradients that backwards under `no_sync` accumulated are never averaged.",
        "Reduce the accumulated `.grad` after the first synchronised backward (in a post-accumulate hook), not "
        "only the gradient of that backward.",
    ),
    "earlier-lost": Mistake(
        "Gradients that earlier backwards accumulated in `.grad` are lost.",
        "Add to `.grad`; where gradients live in buckets, copy them when buckets are rebuilt.",
    ),
    "never-reduced": Mistake(
        "A value is not averaged: every rank keeps its own.",
        "All-reduce every gradient in backward; if some are right, find parameters without a hook. Forward "
        "decides whether a backward synchronises, wherever the backward runs.",
    ),
    "left-out": Mistake(
        "Some gradients, or parts of them, are not averaged: every rank keeps its own, while others are averaged.",
        "Find parameters that have no hook, are in no bucket, or count as unused; check that a bucket is sent whole.",
    ),
    "broadcast-unasked": Mistake(
        "A value is rank 0's where each rank must still have its own.",
        "Broadcast no ignored parameters and buffers, nothing where the broadcast is switched off, and buffers at the "
        "moment that the option or the buffer hook's location names, before forward or behind it.",
    ),
    "reduced-not-used": Mistake(
        "A reduction runs, and ranks keep values of their own.",
        "Write the result of the reduction to `.grad`, including the part that had been accumulated before.",
    ),
    "reduced-local": Mistake(
        "A value that every rank must keep for itself is reduced.",
        "Reduce neither ignored parameters nor gradients of a forward under `no_sync`, wherever its backward runs.",
    ),
    "sign-of-zero": Mistake(
        "The sign of a zero is lost.",
        "Begin no sum with a zero where every rank has a gradient, and add none to what forward returns.",
    ),
    "off-by-rounding": Mistake("Values are off by rounding only.", "Divide where the requirement says, and once."),
    "zeros": Mistake("Values are zero where they must not be.", "Wait for the reduction, and copy its result back."),
    "wrong-rank": Mistake("A value reaches the wrong rank.", "Check the order of ranks in scatter and gather."),
    "never-divided": Mistake(
        "Sums are never divided by the world size, or at 2 ranks something is counted twice.",
        "Divide by the size of the process group, once. If gradients of 3 ranks are right, find the value that is "
        "added twice.",
    ),
    "conjugated": Mistake(
        "A complex value is conjugated.", "Resolve the conjugate bit (`resolve_conj`) before memory is read or sent."
    ),
    "divided-by-users": Mistake(
        "Some averages are taken over the ranks that used a parameter, not over all.",
        "Divide by the size of the process group; a rank that did not use the parameter contributes zeros.",
    ),
    "divided-twice": Mistake(
        "Gradients are divided by the world size once too often, or the result of a comm hook is not used.",
        "Divide by the size of the process group, once; with a comm hook, divide nothing and use its result.",
    ),
    "stale": Mistake(
        "A value is an earlier or later step's.",
        "A gradient: copy it into its bucket in every backward, and wait for the reduction before it is read. A "
        "parameter or a buffer: find the code that restores, resets or copies an earlier value.",
    ),
    "not-cleared": Mistake("A value includes another step's.", "Clear or overwrite the bucket in every backward."),
    "transposed": Mistake(
        "A value is transposed: copied with other strides.", "Copy with the strides of the parameter."
    ),
    "not-broadcast": Mistake(
        "A value is not broadcast from rank 0.",
        "Broadcast parameters and buffers at construction, and buffers before every forward.",
    ),
    "mixed-up": Mistake(
        "Two parameters' values are mixed up.",
        "Let every bucket keep the order of its parameters, the same on every rank.",
    ),
    "reordered": Mistake(
        "A value's elements are in another order: a wrong offset, or wrong strides.",
        "Copy into and out of the bucket with the parameter's offset and strides.",
    ),
    "scaled": Mistake("Values are a multiple of the right ones.", "Find the division or multiplication."),
    "low-precision": Mistake(
        "Values are rounded to a dtype of low precision.", "Reduce and keep them in the parameter's dtype."
    ),
    "goes-astray": Mistake(
        "A training takes other steps than without DDP.",
        "Correct the other causes first: a wrong step makes all later steps wrong.",
        secondary=True,
    ),
    "part": Mistake(
        "A part of a value is wrong.", "Check where that part begins and ends in a bucket, in a chunk or in the tensor."
    ),
    "lacks-check": Mistake(
        "A call that must be refused is accepted.", "Check it, and raise the error that the requirement names."
    ),
    "says-nothing": Mistake(
        "An error or a warning is missing.", "Raise or warn as the requirement demands, and mention what it names."
    ),
    "raises": Mistake("An exception is raised where there must be none.", "The evidence has its message."),
    "not-connected": Mistake(
        "Ranks could not connect to each other, so that the scenario never began.",
        "Run it again on a machine with less load; if it still fails, check the backend with `ddp-conformance smoke`.",
    ),
    "filled-in": Mistake(
        "An absent gradient is filled in with zeros.", "Leave `.grad` None where no rank used the parameter."
    ),
    "not-none": Mistake(
        "A gradient has a value where it must be None.",
        "Leave `.grad` None where no rank used the parameter, and where an optimizer or the user has cleared it.",
    ),
    "none": Mistake(
        "A gradient is None where it must have a value.", "Write the result of the reduction to `.grad` on every rank."
    ),
}
