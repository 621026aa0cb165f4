"""Faults of the page tables: whose page it is, where a slot's tokens are, how many there are."""

import numpy as np

from jaxinfer.evaluation.faults.fault import BEFORE, Fault, tags
from jaxinfer.evaluation.faults.scene import Scene

NO_TAGS = "nothing looks at tags"


def page_tag(scene: Scene) -> bool:
    page = scene.page()
    scene.edit("page_tags", lambda a: scene.flip(a, page))
    return True


def expected_tag(scene: Scene) -> bool:
    column = scene.column()
    scene.edit("expected_tags", lambda a: scene.flip(a, (scene.slot, column)))
    return True


def slot_tag(scene: Scene) -> bool:
    scene.edit("slot_tags", lambda a: scene.flip(a, scene.slot))
    return True


def table_bit(scene: Scene) -> bool:
    column = scene.column()
    scene.edit("page_table", lambda a: scene.flip(a, (scene.slot, column)))
    return True


def table_points_to_another(scene: Scene) -> bool:
    other = scene.other_slot()
    if other is None:
        return False
    column, page = scene.column(), int(scene.rng.choice(scene.pages(other)))
    scene.edit("page_table", lambda a: a.__setitem__((scene.slot, column), page))
    return True


def table_columns_exchanged(scene: Scene) -> bool:
    """Pages of one slot in the wrong order, their tags not moved with them."""
    if len(scene.pages()) < 2:
        return False
    one, other = scene.rng.choice(len(scene.pages()), 2, replace=False)
    row = scene.read("page_table")[scene.slot]

    def change(a: np.ndarray) -> None:
        a[scene.slot, one], a[scene.slot, other] = row[other], row[one]

    scene.edit("page_table", change)
    return True


def rows_exchanged(scene: Scene) -> bool:
    """Two slots take each other's whole row: pages, tags and length."""
    other = scene.other_slot()
    if other is None:
        return False
    pair = [scene.slot, other]
    for field in ("page_table", "expected_tags", "lengths"):
        scene.edit(field, lambda a: a.__setitem__(pair, a[pair[::-1]]))
    return True


def length_bit(scene: Scene) -> bool:
    """One of the bits that a possible length has; any other makes one that no slot can have."""
    bit = int(scene.rng.integers(scene.engine.config.max_context.bit_length()))
    scene.edit("lengths", lambda a: scene.flip(a, scene.slot, bit))
    return True


def slot_reopened(scene: Scene) -> bool:
    """The slot's tag is renewed as if it had been given to another request."""
    state = scene.state.allocator
    tag = int(np.asarray(state.next_slot_tag)) * 2654435761 % 2**32
    scene.edit("slot_tags", lambda a: a.__setitem__(scene.slot, np.uint32(tag)))
    return True


TABLES = (
    Fault("page tag, one bit", "the tag of a page in use", page_tag, claims=tags(), why=NO_TAGS),
    Fault("expected tag, one bit", "the tag that a slot was given", expected_tag, claims=tags(), why=NO_TAGS),
    Fault("slot tag, one bit", "the tag of a slot in use", slot_tag, (23,), tags(), NO_TAGS),
    Fault("slot given away", "a slot in use is opened again", slot_reopened, (23,), tags(), NO_TAGS),
    Fault("page table, one bit", "an entry of a slot in use", table_bit, (1, 10), tags(), NO_TAGS),
    Fault("page table, another's page", "an entry names a page of another", table_points_to_another, (1,), tags(),
          NO_TAGS),
    Fault("page table, order", "two entries of a slot exchanged", table_columns_exchanged, (), tags(), NO_TAGS),
    Fault(
        "length, one bit",
        "a low bit of the length of a slot in use",
        length_bit,
        claims={"digest": BEFORE, "digest-all": BEFORE},
        why="tags know pages, not tokens: they see a length that no slot can have or that needs a page more",
    ),
    Fault(
        "rows exchanged",
        "two slots take each other's pages, tags and length together",
        rows_exchanged,
        (23,),
        why="each page still carries the tag beside it and holds what was written; no tag binds a row to its slot",
        alone=False,
    ),
)  # fmt: skip
