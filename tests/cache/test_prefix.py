"""The prefix tree: contents decide, not hashes; the least recently used leaf goes first; nothing in use does."""

import numpy as np
import pytest

from jaxinfer.cache.prefix import PrefixTree

PAGE = 2
SAME_HASH = 2**61 - 1  # added to an int it leaves Python's hash as it was


def enter(tree: PrefixTree, tokens: list[int], first_page: int):
    """Whole pages of a text, numbered from `first_page`, all newly held; the way and the duplicates."""
    count = len(tokens) // PAGE
    pages = list(range(first_page, first_page + count))
    path, spare = tree.insert(tokens, pages, [1000 + page for page in pages], [True] * count)
    tree.acquire(path)
    tree.release(path)
    return [node.page for node in path], [pages[column] for column in spare]


def match(tree: PrefixTree, tokens: list[int]) -> list[int]:
    return [node.page for node in tree.match(tokens)]


@pytest.fixture
def tree() -> PrefixTree:
    return PrefixTree(PAGE)


def test_the_longest_beginning_in_whole_pages(tree):
    enter(tree, [1, 2, 3, 4, 5, 6], 10)
    assert match(tree, [1, 2, 3, 4, 5, 6, 7]) == [10, 11, 12]
    assert match(tree, [1, 2, 3, 4, 5]) == [10, 11]
    assert match(tree, [1, 2, 4, 3]) == [10]
    assert match(tree, [3, 4]) == match(tree, [1]) == match(tree, []) == []


def test_texts_with_one_hash_do_not_share_a_page(tree):
    """Fault 17."""
    text = [5, 9]
    other = [5 + SAME_HASH, 9]
    assert hash(tuple(text)) == hash(tuple(other)) and text != other
    enter(tree, text, 10)
    assert match(tree, other) == []
    enter(tree, other, 20)
    assert match(tree, text) == [10] and match(tree, other) == [20]


def test_a_duplicate_is_named_and_nothing_points_at_it(tree):
    """Fault 6: the first to come stays; the other's later pages go on from it."""
    enter(tree, [1, 2, 3, 4], 10)
    assert enter(tree, [1, 2, 3, 4, 5, 6], 20) == ([10, 11, 22], [20, 21])
    assert match(tree, [1, 2, 3, 4, 5, 6]) == [10, 11, 22] and sorted(tree.pages) == [10, 11, 22]


def test_no_page_is_entered_without_a_hold_nor_after_one(tree):
    path, spare = tree.insert([1, 2, 3, 4, 5, 6], [10, 11, 12], [0, 0, 0], [True, False, True])
    assert [node.page for node in path] == [10] and spare == [2]
    assert match(tree, [1, 2, 3, 4, 5, 6]) == [10]


def test_a_forgotten_page_takes_along_what_follows_it(tree):
    enter(tree, [1, 2, 3, 4, 5, 6], 10)
    enter(tree, [1, 2, 3, 4, 7, 8], 20)
    enter(tree, [1, 2, 9, 9], 30)
    tree.forget(tree.match([1, 2, 3, 4])[1])
    assert sorted(tree.pages) == [10, 31] == sorted(node.page for node in tree.idle)
    assert match(tree, [1, 2, 3, 4, 5, 6]) == [10] and match(tree, [1, 2, 9, 9]) == [10, 31]


def test_the_least_recently_used_leaf_goes_first(tree):
    enter(tree, [1, 2, 3, 4], 10)
    enter(tree, [1, 2, 5, 6], 20)
    enter(tree, [7, 8], 30)
    used = tree.match([1, 2, 3, 4])
    tree.acquire(used)
    tree.release(used)
    assert [tree.evict().page for _ in range(4)] == [21, 30, 11, 10] and tree.evict() is None


def test_random_use_against_a_plain_model():
    """Texts of a small alphabet, so that they meet; the model keeps whole texts and the time of their last use."""
    rng, tree, clock = np.random.default_rng(0), PrefixTree(PAGE), 0
    used: dict[tuple[int, ...], int] = {}  # by text up to and with the page
    holders: list[tuple[list, list]] = []
    page = 0
    for _ in range(4000):
        clock += 1
        text = rng.integers(0, 2, 2 * int(rng.integers(1, 5))).tolist()
        ways = [tuple(text[: 2 * n + 2]) for n in range(len(text) // 2)]
        action = rng.random()
        if action < 0.4:
            path, spare = tree.insert(text, range(page, page + len(ways)), [0] * len(ways), [True] * len(ways))
            assert [c for c, way in enumerate(ways) if way in used] == spare and len(path) == len(ways)
            page += len(ways)
        elif action < 0.8:
            path = tree.match(text)
            ways = ways[: len(path)]
            assert len(path) == sum(way in used for way in ways)
        elif holders:
            path, ways = holders.pop(int(rng.integers(len(holders))))
            tree.release(path)
            used |= dict.fromkeys(ways, clock)
            continue
        else:
            continue
        tree.acquire(path)
        holders.append((path, ways))
        used |= dict.fromkeys(ways, clock)
        if len(holders) > 4 or rng.random() < 0.3:
            path, ways = holders.pop(0)
            tree.release(path)
            used |= dict.fromkeys(ways, clock)
        busy = {way for _, held in holders for way in held}
        assert {way for way in used if way not in busy} == {_text(node) for node in tree.idle}
        if rng.random() < 0.5 and (node := tree.evict()) is not None:
            way = _text(node)
            leaves = [w for w in used if w not in busy and not any(o[: len(w)] == w and o != w for o in used)]
            assert way in leaves and used[way] == min(used[w] for w in leaves)
            del used[way]
    assert page > 1000


def _text(node) -> tuple[int, ...]:
    return (*_text(node.parent), *node.tokens) if node.parent else ()
