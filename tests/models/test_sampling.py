from collections import Counter

import pytest
import torch

from myelin.errors import ModelError
from myelin.models.sampling import sample

LOGITS = torch.tensor([0.0, 3.0, -1.0, 2.0])


def draw(
    logits: torch.Tensor = LOGITS,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    times: int = 400,
) -> Counter[int]:
    generator = torch.Generator().manual_seed(11)
    return Counter(
        sample(logits, temperature=temperature, top_k=top_k, generator=generator)
        for _ in range(times)
    )


def test_temperature_zero_takes_the_likeliest_token() -> None:
    assert draw(temperature=0.0, times=5) == {1: 5}


def test_a_tiny_temperature_takes_the_likeliest_token_without_overflow() -> None:
    assert draw(LOGITS * 1e4, temperature=1e-30, times=5) == {1: 5}


def test_frequencies_follow_the_softmax() -> None:
    drawn = draw(times=4000)
    for token, chance in enumerate(LOGITS.softmax(0).tolist()):
        assert abs(drawn[token] / 4000 - chance) < 0.03


def test_a_high_temperature_flattens_the_choice() -> None:
    assert draw(temperature=100.0)[2] > draw(temperature=1.0)[2] + 50


def test_top_k_draws_only_among_the_likeliest() -> None:
    assert set(draw(temperature=5.0, top_k=2)) == {1, 3}
    assert set(draw(temperature=5.0, top_k=1)) == {1}


def test_a_top_k_beyond_the_vocabulary_is_all_of_it() -> None:
    assert draw(top_k=99) == draw(top_k=None)


def test_the_same_generator_state_draws_the_same_tokens() -> None:
    assert draw(times=50) == draw(times=50)


def test_forbidden_tokens_may_be_minus_infinity() -> None:
    assert set(draw(torch.tensor([1.0, -torch.inf, 1.0]))) == {0, 2}


def test_half_precision_logits_are_taken() -> None:
    assert draw(LOGITS.bfloat16(), temperature=0.0, times=1) == {1: 1}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_of_a_diverged_model_are_refused(bad: float) -> None:
    with pytest.raises(ModelError, match="diverged"):
        draw(torch.tensor([0.0, bad, 1.0]), times=1)


@pytest.mark.parametrize("logits", [torch.zeros(2, 3), torch.zeros(0), torch.tensor(1.0)])
def test_logits_must_be_those_of_one_position(logits: torch.Tensor) -> None:
    with pytest.raises(ModelError, match="one position"):
        draw(logits, times=1)


@pytest.mark.parametrize("temperature", [-1.0, float("nan"), float("inf")])
def test_an_impossible_temperature_is_refused(temperature: float) -> None:
    with pytest.raises(ModelError, match="temperature"):
        draw(temperature=temperature, times=1)


def test_a_top_k_of_zero_is_refused_and_not_taken_for_all() -> None:
    with pytest.raises(ModelError, match="None for all"):
        draw(top_k=0, times=1)
