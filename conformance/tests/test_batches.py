"""The data in the repository, and what is drawn from it."""

from importlib import resources

import torch

from conformance.models.batches import digits, mixed_seed, text


def test_digits_are_the_uci_test_set() -> None:
    images, labels = digits()
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert images.min() == 0.0
    assert images.max() == 1.0
    # The class sizes that the data set's description states.
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_text_is_ascii_and_whole() -> None:
    characters, alphabet = text()
    assert len(characters) == 54675
    content = "".join(alphabet[index] for index in characters)
    assert content.startswith("The Declaration of Independence")
    assert content.rstrip().endswith("election of\nRepresentatives shall have intervened.")


def test_every_data_file_has_source_and_licence() -> None:
    folder = resources.files("conformance.models").joinpath("data")
    notice = folder.joinpath("NOTICE").read_text()
    for file in folder.iterdir():
        if file.name != "NOTICE":
            assert f"\n{file.name}\n" in notice
    assert notice.count("Licence:") == 2


def test_seeds_depend_on_every_part() -> None:
    seeds = {mixed_seed("batch", *parts) for parts in ((0, 0, 1), (0, 1, 0), (1, 0, 0), (0, 0, 0), (0, 10), (1, 0))}
    assert len(seeds) == 6
    assert mixed_seed("batch", 1, 2) == 4207538963531480751
