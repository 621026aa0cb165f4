"""Bytes of the check against bytes of a step."""

import pytest

from jaxinfer.config import Precision
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.integrity import check_bytes
from jaxinfer.planning.model import PlannedModel

KIMI, H200 = PlannedModel.find("kimi-k2.6"), GPU.find("h200")
PRECISION = Precision.parse("int4:g32", "fp8_e4m3")


def bytes_of(level: str, batch: int = 8, context: int = 21_440, sample: int = 1):
    return check_bytes(KIMI, PRECISION, H200, 8, batch, context, 64, level, sample)


def test_a_page_of_kimi_by_hand():
    """61 layers of 576 bytes a token, whole on every GPU: 335 pages of 64 tokens hold 21,440."""
    token = 61 * 576
    assert bytes_of("off").check == 0
    assert bytes_of("tags").check == 8 * 335 * 16
    assert bytes_of("digest").check == 8 * (335 * 24 + 64 * token + token)


@pytest.mark.parametrize("batch", [1, 8, 32])
def test_it_is_far_below_one_percent_of_a_step(batch):
    assert bytes_of("tags", batch).share < 1e-5 < bytes_of("digest", batch).share < 2e-3


def test_every_page_costs_about_what_attention_reads():
    found = bytes_of("digest", sample=335)
    assert found.check == pytest.approx(8 * 21_440 * 61 * 576, rel=0.01)
