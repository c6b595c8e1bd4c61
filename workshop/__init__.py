"""What serves only this repository and is not installed: generated pages, tables of reports."""

from pathlib import Path

#: The checkout.
ROOT = Path(__file__).parents[1]
