"""Logits of a few families against the reference library's; the whole table is `experiments.parity`."""

import pytest

pytest.importorskip("torch", reason="parity needs the parity extra: pip install 'jaxinfer[parity]'")
pytest.importorskip("transformers", reason="parity needs the parity extra: pip install 'jaxinfer[parity]'")

from experiments import parity  # noqa: E402


@pytest.mark.parametrize("case", parity.CASES, ids=lambda case: f"{case.family}-{case.format}-{case.note}")
def test_parity(case, tmp_path):
    row = parity.compare(case, tmp_path)
    assert row["within"] and row["top1_agreement"] == 1.0, row
