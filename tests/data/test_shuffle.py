import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from myelin.data.shuffle import shuffled

SEEDS = st.integers(-(2**70), 2**70)


def whole(count: int, *, seed: int = 0, epoch: int = 0) -> list[int]:
    order: list[int] = shuffled(np.arange(count), count, seed=seed, epoch=epoch).tolist()
    return order


@given(count=st.integers(1, 700), seed=SEEDS, epoch=st.integers(0, 10**9))
def test_every_item_comes_exactly_once(count: int, seed: int, epoch: int) -> None:
    assert sorted(whole(count, seed=seed, epoch=epoch)) == list(range(count))


@given(count=st.integers(1, 300), seed=SEEDS, data=st.data())
def test_any_place_can_be_asked_for_alone(count: int, seed: int, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, count - 1), max_size=20))
    order = whole(count, seed=seed)
    assert shuffled(places, count, seed=seed, epoch=0).tolist() == [order[p] for p in places]


def test_the_order_is_the_same_on_every_machine_and_in_every_version() -> None:
    assert whole(10) == [1, 5, 6, 0, 8, 2, 4, 9, 3, 7]
    far = shuffled([0, 1, 10**9], 10**12, seed=-3, epoch=7)
    assert far.tolist() == [161887106016, 674932445869, 512548682260]


def test_seeds_and_epochs_give_orders_of_their_own() -> None:
    orders = {
        tuple(whole(50, seed=seed, epoch=epoch)) for seed in (-1, 0, 1, 2**80) for epoch in range(5)
    }
    assert len(orders) == 20


def test_global_generators_are_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    first, before = whole(100), torch.get_rng_state()
    torch.manual_seed(2)
    np_before = np.random.get_state()[1].tolist()  # type: ignore[index]
    assert whole(100) == first
    assert np.random.get_state()[1].tolist() == np_before  # type: ignore[index]
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), before)


def test_every_item_is_as_likely_at_every_place() -> None:
    count, epochs = 12, 2000
    seen = np.zeros((count, count))
    for epoch in range(epochs):
        seen[np.arange(count), whole(count, epoch=epoch)] += 1
    expected = epochs / count
    chi_square = ((seen - expected) ** 2 / expected).sum()
    # 121 degrees of freedom: mean 121, standard deviation 15.6; the seeds are fixed.
    assert 121 - 5 * 15.6 < chi_square < 121 + 5 * 15.6


def test_neighbours_are_torn_apart() -> None:
    order = np.array(whole(10_000))
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.001
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05


def test_a_huge_corpus_needs_no_stored_order() -> None:
    count = 2**40 + 17
    chosen = shuffled(np.arange(1000), count, seed=0, epoch=0)
    assert len(set(chosen.tolist())) == 1000
    assert 0 <= chosen.min() < count // 50
    assert count - count // 50 < chosen.max() < count
