from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from myelin.errors import BatchError, ModelError
from myelin.models.losses import CountedLoss, Loss, TokenCrossEntropy, total, weigh

VOCAB = 7


def token_batch(batch: int, tokens: int, ignored: list[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + tokens)
    logits = torch.randn(batch, tokens, VOCAB, generator=generator, dtype=torch.float64).float()
    targets = torch.randint(0, VOCAB, (batch, tokens), generator=generator)
    targets[torch.tensor(ignored).reshape(batch, tokens)] = -100
    return logits, targets


def in_microbatches(
    loss: Loss, output: torch.Tensor, target: torch.Tensor, sizes: list[int]
) -> tuple[float, torch.Tensor]:
    output = output.clone().requires_grad_()
    targets = torch.split(target, sizes)
    weight = sum(weigh(loss, part) for part in targets)
    shares = [
        total(loss, o, t, weight) for o, t in zip(torch.split(output, sizes), targets, strict=True)
    ]
    for share in shares:
        share.backward()  # type: ignore[no-untyped-call]
    assert output.grad is not None
    return sum(share.item() for share in shares), output.grad


@given(st.data())
@settings(deadline=None, max_examples=30)  # the first call into torch is slow
def test_unequal_ignored_targets_change_neither_loss_nor_gradients(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=4))
    batch, tokens = sum(sizes), data.draw(st.integers(1, 4))
    ignored = data.draw(
        st.lists(st.booleans(), min_size=batch * tokens, max_size=batch * tokens).filter(
            lambda flags: not all(flags)
        )
    )
    logits, targets = token_batch(batch, tokens, ignored)

    value, gradient = in_microbatches(TokenCrossEntropy(), logits, targets, sizes)

    whole = logits.clone().requires_grad_()
    expected = functional.cross_entropy(whole.flatten(0, 1), targets.flatten())
    expected.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    torch.testing.assert_close(torch.tensor(value), expected.detach())
    torch.testing.assert_close(gradient, whole.grad)


def test_a_microbatch_with_every_target_ignored_adds_exactly_nothing() -> None:
    logits, targets = token_batch(2, 3, [True] * 3 + [False] * 3)
    _, gradient = in_microbatches(TokenCrossEntropy(), logits, targets, [1, 1])
    assert torch.equal(gradient[0], torch.zeros(3, VOCAB))
    assert gradient[1].abs().sum() > 0


def test_a_plain_mean_is_weighted_by_samples_so_uneven_microbatches_do_not_change_it() -> None:
    generator = torch.Generator().manual_seed(0)
    output, target = torch.randn(2, 5, 3, generator=generator)
    value, gradient = in_microbatches(functional.mse_loss, output, target, [1, 3, 1])

    whole = output.clone().requires_grad_()
    expected = functional.mse_loss(whole, target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    torch.testing.assert_close(torch.tensor(value), expected.detach())
    torch.testing.assert_close(gradient, whole.grad)


def test_half_precision_logits_are_summed_in_fp32() -> None:
    logits, targets = token_batch(2, 3, [False] * 6)
    loss = TokenCrossEntropy()
    assert loss(logits.bfloat16(), targets).dtype == torch.float32
    assert torch.equal(loss(logits.bfloat16(), targets), loss(logits.bfloat16().float(), targets))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_targets_of_any_whole_number_type_are_taken(dtype: torch.dtype) -> None:
    logits, targets = token_batch(2, 3, [False] * 6)
    assert torch.equal(
        TokenCrossEntropy()(logits, targets), TokenCrossEntropy()(logits, targets.to(dtype))
    )


def test_byte_156_is_a_token_and_not_the_ignored_minus_100() -> None:
    assert TokenCrossEntropy().count(torch.tensor([[156, 3]], dtype=torch.uint8)) == 2


def test_a_chosen_ignore_index_is_neither_counted_nor_summed() -> None:
    logits, targets = token_batch(1, 3, [False] * 3)
    targets[0] = torch.tensor([0, 2, 0])
    loss = TokenCrossEntropy(ignore_index=0)
    assert loss.count(targets) == 1
    expected = functional.cross_entropy(logits[0, 1:2], targets[0, 1:2])
    torch.testing.assert_close(loss(logits, targets), expected)


def test_token_cross_entropy_is_a_counted_loss_and_a_function_is_not() -> None:
    assert isinstance(TokenCrossEntropy(), CountedLoss)
    assert not isinstance(functional.mse_loss, CountedLoss)
    assert not isinstance(nn.MSELoss(), CountedLoss)


def test_logits_of_another_shape_than_the_targets_are_refused() -> None:
    with pytest.raises(BatchError, match=r"\(2, 3, 7\).*\(2, 4\)"):
        TokenCrossEntropy()(torch.zeros(2, 3, VOCAB), torch.zeros(2, 4, dtype=torch.long))


@pytest.mark.parametrize(
    "target",
    [
        torch.zeros(3, 2),
        (torch.zeros(3), torch.zeros(5)),
        {"a": 1, "y": [torch.zeros(3, 1, 1)], "z": torch.zeros(4)},
        [None, (torch.zeros(3),)],
    ],
)
def test_samples_are_counted_in_the_first_tensor_of_any_nesting(target: Any) -> None:
    assert weigh(functional.mse_loss, target) == 3


@pytest.mark.parametrize("target", [None, [], {}, "text", torch.tensor(1.0), {"a": 3}])
def test_a_target_without_countable_samples_is_refused_with_the_remedy(target: Any) -> None:
    with pytest.raises(BatchError, match=r"dimension 0 is the sample, or a loss with a count"):
        weigh(functional.mse_loss, target)


def test_a_batch_with_nothing_to_learn_from_is_refused_instead_of_nan() -> None:
    logits, targets = token_batch(1, 2, [True, True])
    with pytest.raises(BatchError, match="every target is ignored"):
        total(TokenCrossEntropy(), logits, targets, weigh(TokenCrossEntropy(), targets))


def test_a_microbatch_without_samples_is_refused_instead_of_nan() -> None:
    with pytest.raises(BatchError, match="no samples"):
        total(functional.mse_loss, torch.zeros(0, 2), torch.zeros(0, 2), 4)


def test_a_loss_per_sample_is_refused_because_it_is_no_scalar() -> None:
    with pytest.raises(ModelError, match=r"shape \(3,\).*one number"):
        total(lambda output, target: output - target, torch.zeros(3), torch.zeros(3), 3)


def test_a_loss_that_returns_a_float_is_refused() -> None:
    def loss(output: Any, target: Any) -> Any:
        return 1.0

    with pytest.raises(ModelError, match="float"):
        total(loss, torch.zeros(3), torch.zeros(3), 3)


def test_a_loss_with_a_single_element_in_some_dimensions_is_a_scalar() -> None:
    assert total(lambda output, _: output.sum().reshape(1, 1), torch.ones(3), torch.ones(3), 3) == 3


def test_a_negative_count_is_refused() -> None:
    class Wrong(TokenCrossEntropy):
        def count(self, target: torch.Tensor) -> int:
            return -1

    with pytest.raises(ModelError, match="counted -1"):
        weigh(Wrong(), torch.zeros(1))
