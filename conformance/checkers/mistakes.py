"""Known mistakes of a DDP, by name: what it does wrong, and what to do.

The rules that recognise them need tensors; whoever makes pages of a report needs these sentences alone.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mistake:
    """A mistake in words: `title` says what the DDP does, `remedy` what to do.

    One that `follows` comes of others, and is told after them.
    """

    title: str
    remedy: str
    follows: bool = False


MISTAKES = {
    "wrong-dtype": Mistake(
        "A value has the wrong dtype.",
        "Cast to the dtype that the requirement names.",
    ),
    "wrong-layout": Mistake(
        "A value has the wrong layout.",
        "Keep the layout, dense or sparse, of what the module's own backward gives.",
    ),
    "wrong-shape": Mistake(
        "A value has the wrong shape.",
        "Copy what was reduced back with its own shape.",
    ),
    "not-finite": Mistake(
        "Values overflow or become not-a-number.",
        "Divide before the sum where its range is too small, and initialise every buffer that is reduced.",
    ),
    "no-sync-left-out": Mistake(
        "What backwards under `no_sync` left is never averaged.",
        "Reduce the accumulated `.grad` after the first backward that synchronises (a hook that runs "
        "once it has been accumulated), not only the gradient of that backward.",
    ),
    "earlier-lost": Mistake(
        "What earlier backwards accumulated in `.grad` is lost.",
        "Add to what `.grad` holds; where gradients live in buckets, take it along when buckets are made anew.",
    ),
    "never-reduced": Mistake(
        "A value is never reduced: every rank keeps its own.",
        "All-reduce every gradient in backward; where some are right, see which parameters have no hook, and whether"
        " the forward decides, wherever its backward runs.",
    ),
    "left-out": Mistake(
        "Some gradients, or parts of them, are never reduced: every rank keeps its own, while others are averaged.",
        "See which parameters have no hook, are in no bucket, or are taken for unused, and whether a bucket is sent "
        "whole.",
    ),
    "broadcast-unasked": Mistake(
        "A value is broadcast that every rank must keep for itself.",
        "Leave out of the broadcast what is ignored, and broadcast nothing where that is switched off.",
    ),
    "reduced-not-used": Mistake(
        "A reduction runs, and ranks keep values of their own.",
        "Write what was reduced back to `.grad`, all of it: what had been accumulated before as well.",
    ),
    "reduced-local": Mistake(
        "What every rank must keep for itself is reduced.",
        "Reduce neither ignored parameters nor what comes of a forward under `no_sync`, wherever its backward runs.",
    ),
    "sign-of-zero": Mistake(
        "The sign of a zero is lost.",
        "Begin no sum with a zero of your own where every rank has a gradient.",
    ),
    "off-by-rounding": Mistake(
        "Values are off by rounding only.",
        "Divide where the requirement says, and once.",
    ),
    "zeros": Mistake(
        "Zeros come where values must.",
        "Copy what was reduced back, after waiting for it.",
    ),
    "wrong-rank": Mistake(
        "A value comes to the wrong rank.",
        "See the order of ranks in what is scattered or gathered.",
    ),
    "never-divided": Mistake(
        "Sums are never divided by the world size, or at 2 ranks something is counted twice.",
        "Divide by the size of the process group, once. If gradients of 3 ranks are right, see what is added twice.",
    ),
    "conjugated": Mistake(
        "A complex value is conjugated.",
        "Resolve the bit of conjugation (`resolve_conj`) before memory is read or sent.",
    ),
    "divided-by-users": Mistake(
        "Some averages are taken over the ranks that used a parameter, not over all.",
        "Divide by the size of the process group, whoever used the parameter; who did not contributes zeros.",
    ),
    "divided-twice": Mistake(
        "Gradients are divided by the world size once too often.",
        "Divide by the size of the process group, once.",
    ),
    "stale": Mistake(
        "A value is an earlier or later step's.",
        "Copy gradients into the bucket in every backward, and wait for the reduction before they are read.",
    ),
    "not-cleared": Mistake(
        "A value has another step's added.",
        "Clear or overwrite the bucket in every backward.",
    ),
    "transposed": Mistake(
        "A value is transposed: copied with other strides.",
        "Copy with the strides of the parameter.",
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
    "scaled": Mistake(
        "Values are a multiple of what they must be.",
        "Look for what divides or multiplies.",
    ),
    "low-precision": Mistake(
        "Values are rounded to a dtype of low precision.",
        "Reduce and keep them in the parameter's dtype.",
    ),
    "goes-astray": Mistake(
        "A training takes other steps than without DDP.",
        "Mend the other causes first: what spoils one step spoils all that follow.",
        follows=True,
    ),
    "part": Mistake(
        "A part of a value is wrong.",
        "See where that part begins and ends in what was sent: a bucket, a chunk of it, or the tensor itself.",
    ),
    "lacks-check": Mistake(
        "What must be refused is accepted.",
        "Check it, and raise what the requirement names.",
    ),
    "says-nothing": Mistake(
        "Nothing is said where a user must be told.",
        "Raise or warn as the requirement says, with what it names.",
    ),
    "raises": Mistake(
        "An exception is raised where there must be none.",
        "The evidence has its message.",
    ),
    "not-connected": Mistake(
        "Ranks could not connect to each other, so that the scenario never began.",
        "Try it again on a machine that does less; if it stays, try the backend by `ddp-conformance smoke`.",
    ),
    "filled-in": Mistake(
        "An absent gradient is filled in with zeros.",
        "Leave `.grad` None where no rank used the parameter.",
    ),
    "not-none": Mistake(
        "A value is there where None must be.",
        "Leave `.grad` None where no rank used the parameter, and where an optimizer or the user has cleared it.",
    ),
    "none": Mistake(
        "A gradient never arrives: None where a value must be.",
        "Write what was reduced to `.grad` on every rank.",
    ),
}
