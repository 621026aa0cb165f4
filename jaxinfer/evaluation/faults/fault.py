"""Fault: one way in which an engine can break, and which levels claim to catch it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jaxinfer.evaluation.faults.scene import Scene

BEFORE, IN_TIME = "before emission", "no later than the end"


@dataclass(frozen=True)
class Fault:
    """`inject` breaks a scene and returns whether it could; `classes` are the numbers of the public fault classes that
    it stands for (`docs/integrity.md`). `alone`: only the victim is concerned, so that any other request's end is an
    alarm without a cause.

    `claims`: for each level what it promises: BEFORE (no token drawn after the fault is shown) or IN_TIME (the request
    never ends as if nothing had happened). A level that is not there promises nothing, and `why` says why.
    """

    name: str
    what: str
    inject: Callable[[Scene], bool]
    classes: tuple[int, ...] = ()
    claims: Mapping[str, str] = field(default_factory=dict)
    why: str = ""
    alone: bool = True


def tags(when: str = BEFORE) -> dict[str, str]:
    """What the tags catch, every level with tags catches."""
    return {"tags": when, "digest": when, "digest-all": when}


def contents() -> dict[str, str]:
    """Wrong bytes in a right page: caught in rotation or at the end, and at once where every page is checked."""
    return {"digest": IN_TIME, "digest-all": BEFORE}


def harmless() -> dict[str, str]:
    """Nothing to catch: what is read does not change, at any level."""
    return {"off": BEFORE, **tags()}
