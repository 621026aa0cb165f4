"""Faults of what pages hold: bits, whole pages, lost and late writes, scales, and rows that nobody should read."""

import numpy as np

from jaxinfer.evaluation.faults.fault import BEFORE, Fault, contents, harmless
from jaxinfer.evaluation.faults.scene import Scene

RIGHT_PAGE = "a tag says whose page it is, not what is in it"
NAN = 0x7F  # of e4m3


def data_bit(scene: Scene) -> bool:
    page = scene.page()
    layers, _, _, width = next(iter(scene.state.cache.entries.values())).shape
    row = int(scene.rng.integers(max(scene.rows(page), 1)))
    place = (int(scene.rng.integers(layers)), page, row, int(scene.rng.integers(width)))
    scene.edit_pool(lambda a: scene.flip(a, place))
    return scene.rows(page) > 0


def data_burst(scene: Scene) -> bool:
    """A few values in a row of one token are overwritten."""
    page = scene.page()
    rows = scene.rows(page)
    if not rows:
        return False
    layer, row, start = (int(scene.rng.integers(n)) for n in (2, rows, 30))
    scene.edit_pool(lambda a: a.__setitem__(np.s_[layer, page, row, start : start + 8], scene.rng.integers(0, 120, 8)))
    return True


def late_write(scene: Scene) -> bool:
    """A write that another request began lands in a page that the victim has by now."""
    other = scene.other_slot()
    if other is None:
        return False
    target, source = scene.page(), int(scene.rng.choice(scene.pages(other)))
    scene.edit_pool(lambda a: a.__setitem__(np.s_[:, target], a[:, source]))
    return True


def lost_write(scene: Scene) -> bool:
    """The last tokens of a page are not there: their write has not landed and never will."""
    page = scene.page()
    rows = scene.rows(page)
    if not rows:
        return False
    first = int(scene.rng.integers(rows))
    scene.edit_pool(lambda a: a.__setitem__(np.s_[:, page, first:rows], 0))
    return True


def torn_layers(scene: Scene) -> bool:
    """A page arrived in some layers and not in others."""
    page = scene.page()
    if not scene.rows(page):
        return False
    layer = int(scene.rng.integers(2))
    scene.edit_pool(lambda a: a.__setitem__(np.s_[layer, page], scene.rng.integers(0, 120, a.shape[2:])))
    return True


def pages_exchanged(scene: Scene) -> bool:
    """The bytes of two pages of the victim's, each in the other's place."""
    pages = scene.pages()
    if len(pages) < 2:
        return False
    pair = scene.rng.choice(pages, 2, replace=False)
    scene.edit_pool(lambda a: a.__setitem__(np.s_[:, pair], a[:, pair[::-1]]))
    return True


def scale(scene: Scene) -> bool:
    layer = int(scene.rng.integers(2))
    factor = float(scene.rng.choice([0.5, 0.9, 1.1, 2.0]))
    scene.edit_scales(lambda a: a.__setitem__(layer, a[layer] * factor))
    return True


def digest_bit(scene: Scene) -> bool:
    page = scene.page()
    return scene.edit_digests(lambda a: scene.flip(a, page))


def poison(scene: Scene) -> bool:
    """NaN wherever no slot has a token: free pages, and the rest of each last page."""
    size = scene.engine.config.page_size
    owned = np.zeros((scene.state.allocator.num_pages, size), bool)
    for slot, length in enumerate(scene.read("lengths").tolist()):
        for column, page in enumerate(scene.pages(slot)):
            owned[page] |= column * size + np.arange(size) < length
    scene.edit_pool(lambda a: a.__setitem__((slice(None), ~owned), NAN))
    return True


POOL = (
    Fault("page data, one bit", "a stored value that the victim reads", data_bit, (), contents(), RIGHT_PAGE),
    Fault("page data, burst", "eight stored values in a row", data_burst, (), contents(), RIGHT_PAGE),
    Fault("late write", "another's page lands in the victim's", late_write, (2,), contents(), RIGHT_PAGE),
    Fault("lost write", "tokens whose write never landed", lost_write, (3, 4), contents(), RIGHT_PAGE),
    Fault("torn page", "one layer of a page is something else", torn_layers, (4,), contents(), RIGHT_PAGE),
    Fault("pages exchanged", "the bytes of two pages of a slot", pages_exchanged, (), contents(), RIGHT_PAGE),
    Fault("scale", "a scale of the FP8 pages is off by a factor", scale, (12,),
          {"digest": BEFORE, "digest-all": BEFORE}, "scales belong to no page", alone=False),
    Fault("digest, one bit", "a stored digest", digest_bit, (), contents(), "keeps no digests"),
    Fault("poison", "NaN in every place that no slot's length covers", poison, (13,), harmless()),
)  # fmt: skip
