"""What the check of pages reads beside what a decode step reads: bytes of one GPU, at each level."""

from dataclasses import dataclass

from jaxinfer.config import Precision
from jaxinfer.planning.capacity import kv_gpu_bytes_per_token
from jaxinfer.planning.gpus import GPU
from jaxinfer.planning.model import PlannedModel
from jaxinfer.planning.roofline import decode_floor

ENTRY_BYTES = 16  # of a page of a slot: its number, the tag expected, the tag found, its reference count; each 4
DIGEST_BYTES = 8  # more with digests: the digest of the page and the tokens in it


@dataclass(frozen=True)
class CheckBytes:
    """Bytes that one GPU reads in a decode step of `batch` requests: for the check, and for the step without it."""

    level: str
    batch: int
    check: int
    step: float

    @property
    def share(self) -> float:
        return self.check / self.step


def check_bytes(
    model: PlannedModel,
    precision: Precision,
    gpu: GPU,
    devices: int,
    batch: int,
    context: int,
    page_size: int,
    level: str,
    sample: int = 1,
) -> CheckBytes:
    """Of `batch` requests with `context` tokens each. The tags read four numbers for each page of each request; digests
    also `sample` pages of each request, and the new token of each once more as it is entered."""
    columns = -(-context // page_size)
    token = kv_gpu_bytes_per_token(model, precision.kv, devices)
    check = {
        "off": 0,
        "tags": batch * columns * ENTRY_BYTES,
        "digest": batch * (columns * (ENTRY_BYTES + DIGEST_BYTES) + sample * page_size * token + token),
    }[level]
    floor = decode_floor(model, precision, gpu, devices, batch, context)
    return CheckBytes(level, batch, check, floor.weight_bytes + floor.kv_bytes)
