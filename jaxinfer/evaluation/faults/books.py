"""Faults of the allocator's books: free list, free count, reference counts, releases at the wrong time."""

import numpy as np

from jaxinfer.cache import INVALID
from jaxinfer.evaluation.faults.fault import Fault, harmless, tags
from jaxinfer.evaluation.faults.scene import Scene

REFUSED = "the allocator hands out no page that has an owner, whatever the level"


def freed_in_use(scene: Scene) -> bool:
    """A page returns to the free list under its owner, and is the next to be handed out."""
    page = scene.page()
    count = int(scene.read("free_count"))
    scene.edit("reference_counts", lambda a: a.__setitem__(page, 0))
    scene.edit("free_list", lambda a: a.__setitem__(count, page))
    scene.edit("free_count", lambda a: a.__setitem__(0, count + 1))
    return True


def free_list_bit(scene: Scene) -> bool:
    index = int(scene.rng.integers(max(int(scene.read("free_count")), 1)))
    scene.edit("free_list", lambda a: scene.flip(a, index))
    return True


def listed_twice(scene: Scene) -> bool:
    """The two top entries of the free list are one page."""
    count = int(scene.read("free_count"))
    if count < 2:
        return False
    scene.edit("free_list", lambda a: a.__setitem__(count - 2, a[count - 1]))
    return True


def free_count_bit(scene: Scene) -> bool:
    scene.edit("free_count", lambda a: scene.flip(a, 0))
    return True


def too_many_free(scene: Scene) -> bool:
    """More is said to be free than is: the top of the list is pages in use."""
    more = int(scene.rng.integers(1, 9))
    scene.edit("free_count", lambda a: a.__setitem__(0, min(int(a[0]) + more, scene.state.allocator.num_pages)))
    return True


def reference_count_bit(scene: Scene) -> bool:
    page = scene.page()
    scene.edit("reference_counts", lambda a: scene.flip(a, page))
    return True


def stray_release(scene: Scene) -> bool:
    """The slot is released while its request goes on: a double free from another path."""
    slots = np.full(scene.engine.config.max_slots, INVALID, np.int32)
    slots[0] = scene.slot
    scene.engine.state = scene.engine.programs.release(scene.state, slots)
    return True


def released_twice(scene: Scene) -> bool:
    """The victim is cancelled, and its slot released again after that."""
    slot = scene.slot
    scene.engine.cancel(scene.victim.id)
    slots = np.full(scene.engine.config.max_slots, INVALID, np.int32)
    slots[:2] = slot
    scene.engine.state = scene.engine.programs.release(scene.state, slots)
    return True


BOOKS = (
    Fault("page freed in use", "a live page on the free list, next to be handed out", freed_in_use, (1, 9), tags(),
          "nothing looks at tags"),
    Fault("released in use", "a slot released under its request", stray_release, (24,), tags(),
          "nothing looks at tags"),
    Fault("released twice", "a cancelled request's slot released again", released_twice, (9, 24), harmless()),
    Fault("free list, one bit", "an entry of the free list", free_list_bit, (21,), harmless(), REFUSED),
    Fault("free list, twice", "one page listed twice at the top", listed_twice, (22,), harmless(), REFUSED),
    Fault("free count, one bit", "the number of free pages", free_count_bit, (21,), harmless(), REFUSED),
    Fault("free count, too high", "pages in use said to be free", too_many_free, (21,), harmless(), REFUSED),
    Fault(
        "reference count, one bit", "the count of a page in use", reference_count_bit, (24,), harmless(),
        "a count changes no content; at zero or below the tags fail the slot",
    ),
)  # fmt: skip
