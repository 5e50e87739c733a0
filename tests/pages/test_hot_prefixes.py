"""The hottest prefixes: the nodes with the most hits, with all that they go on from."""

import random

from jaxserve.pages.hot_prefixes import hottest_prefixes
from jaxserve.pages.radix_tree import RadixTree

PAGE = 4


def hottest(tree, count=10, token_ids=8, is_private=lambda namespace: False):
    return hottest_prefixes(
        tree, max_prefixes=count, max_token_ids=token_ids, is_private=is_private
    )


def put(tree, pages, namespace="n", first_page_id=0):
    """Puts a prompt of whole pages in, unlocked again."""
    tokens = [token for page in pages for token in [page] * PAGE]
    root = tree.root(namespace)
    tree.lock(root)
    ids = list(range(first_page_id, first_page_id + len(pages)))
    _, node = tree.extend(root, tokens, ids)
    tree.unlock(node)


def hit(tree, pages, namespace="n"):
    tree.count_hit(tree.match(namespace, [t for page in pages for t in [page] * PAGE]).node)


def test_without_a_cache_there_are_none():
    assert hottest(None) == ()
    assert hottest(RadixTree(PAGE)) == ()


def test_a_shared_beginning_comes_first_and_the_rest_names_it_as_parent():
    tree = RadixTree(PAGE)
    put(tree, [1, 2, 3])
    put(tree, [1, 2, 4], first_page_id=10)
    hit(tree, [1, 2, 4])
    shared, hot, cold = hottest(tree, token_ids=6)
    assert (shared.parent, hot.parent, cold.parent) == (None, 0, 0)
    assert (shared.num_hits, hot.num_hits, cold.num_hits) == (1, 1, 0)
    assert (shared.num_tokens, shared.num_own_tokens, shared.num_pages) == (8, 8, 2)
    assert (hot.num_tokens, hot.num_own_tokens, hot.num_pages) == (12, 4, 1)
    assert shared.token_ids == (1, 1, 1, 1, 2, 2)
    assert (hot.token_ids, cold.token_ids) == ((4,) * 4, (3,) * 4)
    assert (hot.num_uses_ago, cold.num_uses_ago) == (0, 2)


def test_users_are_counted():
    tree = RadixTree(PAGE)
    put(tree, [1])
    assert hottest(tree)[0].num_users == 0
    tree.lock(tree.match("n", [1] * PAGE).node)
    assert hottest(tree)[0].num_users == 1


def test_tokens_of_a_private_namespace_are_not_told():
    tree = RadixTree(PAGE)
    put(tree, [1], "open")
    put(tree, [2], "secret", first_page_id=10)
    found = {
        prefix.is_private: prefix.token_ids
        for prefix in hottest(tree, is_private=lambda namespace: namespace == "secret")
    }
    assert found == {False: (1,) * 4, True: ()}


def test_the_first_few_always_have_their_parents_among_them():
    random.seed(0)
    tree = RadixTree(PAGE)
    for number in range(60):
        put(tree, random.choices((1, 2), k=random.randint(1, 6)), first_page_id=number * 10)
        hit(tree, random.choices((1, 2), k=random.randint(1, 6)))
    for count in range(1, 30):
        found = hottest(tree, count)
        assert len(found) == count
        for place, prefix in enumerate(found):
            if prefix.parent is None:
                assert prefix.num_tokens == prefix.num_own_tokens
            else:
                assert prefix.parent < place
                above = found[prefix.parent]
                assert above.num_tokens + prefix.num_own_tokens == prefix.num_tokens
                assert above.num_hits >= prefix.num_hits
