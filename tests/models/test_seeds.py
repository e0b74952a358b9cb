import threading

import pytest
import torch

from myelin.models.seeds import block_seed, factory_seed, op_seed, seeded


def test_seeds_are_the_same_in_every_version_and_process() -> None:
    assert block_seed(0, 0) == 4843820721388430860
    assert op_seed(0, 0, 0, 0) == 5585365357596471083


def test_seeds_of_different_things_differ_and_fit_into_63_bits() -> None:
    seeds = [block_seed(s, b) for s in (0, 1, 11, -1, 2**80) for b in range(12)]
    seeds += [factory_seed(s) for s in range(3)]
    seeds += [
        op_seed(s, step, b, m)
        for s in (0, 1)
        for step in (0, 1, 11)
        for b in (0, 1)
        for m in (0, 1)
    ]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_the_generator_is_put_back_also_after_an_error() -> None:
    def draw_and_raise() -> None:
        with seeded(1):
            torch.rand(3)
            raise RuntimeError("planted")

    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="planted"):
        draw_and_raise()
    assert torch.equal(torch.get_rng_state(), before)


def test_draws_are_those_of_manual_seed() -> None:
    with seeded(42):
        drawn = torch.rand(5)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(42)
        assert torch.equal(drawn, torch.rand(5))


def test_nested_seeding_does_not_disturb_the_outer_draws() -> None:
    with seeded(1):
        torch.rand(2)
        with seeded(2):
            torch.rand(7)
        nested = torch.rand(2)
    with seeded(1):
        torch.rand(2)
        assert torch.equal(torch.rand(2), nested)


def test_threads_do_not_mix_their_draws() -> None:
    drawn: dict[tuple[int, int], torch.Tensor] = {}
    start = threading.Barrier(4)

    def draw(thread: int) -> None:
        start.wait()
        for turn in range(20):
            with seeded(thread):
                drawn[thread, turn] = torch.cat([torch.rand(100) for _ in range(10)])

    threads = [threading.Thread(target=draw, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 80
    assert all(torch.equal(values, drawn[thread, 0]) for (thread, _), values in drawn.items())
