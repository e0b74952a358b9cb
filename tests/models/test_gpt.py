import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from myelin.errors import BatchError, ModelError
from myelin.models.building import build_blocks, describe, outline
from myelin.models.gpt import GPT, Embedding, Head, Layer, build
from myelin.models.losses import TokenCrossEntropy, total, weigh

TINY = GPT(layers=2, hidden=12, heads=3, vocab=11, context=8)
UNTIED = GPT(layers=2, hidden=12, heads=3, vocab=11, context=8, tied=False)


def built(gpt: GPT, seed: int = 0) -> nn.Sequential:
    return nn.Sequential(*build_blocks(gpt, range(gpt.layers + 2), seed).values())


def tokens(*shape: int, vocab: int = 11) -> torch.Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(3))


def reference(weights: dict[str, torch.Tensor], gpt: GPT, tokens_BT: torch.Tensor) -> torch.Tensor:
    """Compute the same model from its named weights, with the attention written out."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        centred = x - x.mean(-1, keepdim=True)
        scale = (centred.square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    def linear(x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

    T, K = tokens_BT.shape[1], gpt.hidden // gpt.heads
    x = weights["0.token.weight"][tokens_BT] + weights["0.position.weight"][:T]
    hidden_from = torch.ones(T, T, dtype=torch.bool).triu(1)
    for layer in range(1, gpt.layers + 1):
        q, k, v = linear(norm(x, f"{layer}.attention_norm"), f"{layer}.qkv").chunk(3, -1)
        mixed = []
        for head in range(gpt.heads):
            part = slice(head * K, (head + 1) * K)
            scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(K)
            mixed.append(scores.masked_fill(hidden_from, -torch.inf).softmax(-1) @ v[..., part])
        x = x + linear(torch.cat(mixed, -1), f"{layer}.project")
        wide = linear(norm(x, f"{layer}.mlp_norm"), f"{layer}.widen")
        wide = wide * 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
        x = x + linear(wide, f"{layer}.narrow")
    last = gpt.layers + 1
    return norm(x, f"{last}.norm") @ weights[f"{last}.head.weight"].T


@pytest.mark.parametrize("gpt", [TINY, UNTIED])
def test_logits_and_gradients_are_those_of_the_written_out_model(gpt: GPT) -> None:
    model = built(gpt).double()
    torch.manual_seed(1)
    for parameter in model.parameters():  # far from the small initial values
        nn.init.normal_(parameter, std=0.5)
    inputs, targets = tokens(3, 7), tokens(3, 7).flip(0)

    total(TokenCrossEntropy(), model(inputs), targets, 21).backward()  # type: ignore[no-untyped-call]

    unique = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    names = {p: n for n, p in model.named_parameters()}
    weights = {n: unique[names[p]] for n, p in model.named_parameters(remove_duplicate=False)}
    logits = reference(weights, gpt, inputs)
    torch.testing.assert_close(model(inputs), logits, rtol=1e-9, atol=1e-9)
    # The loss is computed in fp32, hence the tolerance of the gradients.
    functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(
        {name: parameter.grad for name, parameter in model.named_parameters()},
        {name: parameter.grad for name, parameter in unique.items()},
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_later_token_never_changes_earlier_logits() -> None:
    model = built(TINY)
    before = tokens(2, 8)
    expected = model(before)
    for place in range(1, 8):
        changed = before.clone()
        changed[:, place] = (changed[:, place] + 1) % 11
        logits = model(changed)
        assert torch.equal(logits[:, :place], expected[:, :place])
        assert not torch.equal(logits[:, place], expected[:, place])


def test_positions_matter() -> None:
    logits = built(TINY)(torch.full((1, 8), 4))
    assert not torch.allclose(logits[0, 1], logits[0, 2])


def test_a_microbatch_gives_the_same_logits_alone_as_after_others() -> None:
    model = built(TINY)
    batch = tokens(4, 8)
    first = model(batch[2:])
    model(batch[:2])
    assert torch.equal(model(batch[2:]), first)


@pytest.mark.parametrize(
    "gpt",
    [
        TINY,
        UNTIED,
        GPT(1, 6, 1, 5, 3),
        GPT(3, 20, 5, 300, 17, tied=False),
        GPT(1, 8, 8, 1, 1),
    ],
)
def test_the_formula_counts_exactly_the_parameters_that_are_built(gpt: GPT) -> None:
    assert gpt.parameters == sum(p.numel() for p in built(gpt).parameters())


@pytest.mark.parametrize(
    ("size", "billions"), [("12b", 11.96), ("24b", 23.46), ("50b", 49.44), ("100b", 101.42)]
)
def test_the_papers_models_have_the_papers_sizes(size: str, billions: float) -> None:
    gpt = GPT.paper(size)
    assert round(gpt.parameters / 1e9, 2) == billions
    with torch.device("meta"):
        blocks = [block() for block in outline(gpt).blocks]
    tied = gpt.vocab * gpt.hidden
    assert sum(p.numel() for b in blocks for p in b.parameters()) - tied == gpt.parameters


def test_the_papers_models_take_another_vocabulary_and_context() -> None:
    assert GPT.paper("12b", vocab=256, context=64) == GPT(48, 4512, 24, 256, 64)


def test_an_unknown_size_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ModelError, match="12b, 24b, 50b, 100b"):
        GPT.paper("13b")


def test_the_description_is_an_import_path_and_plain_values() -> None:
    assert TINY.factory == "myelin.models.gpt:build"
    assert TINY.arguments == {
        "layers": 2,
        "hidden": 12,
        "heads": 3,
        "vocab": 11,
        "context": 8,
        "tied": True,
        "dropout": 0.0,
    }


@pytest.mark.parametrize("name", ["layers", "hidden", "heads", "vocab", "context"])
@pytest.mark.parametrize("value", [0, -1, 2.0, True, "3", None])
def test_sizes_must_be_whole_numbers_of_at_least_one(name: str, value: Any) -> None:
    with pytest.raises(ModelError, match=f"{name}=.*whole number of at least 1"):
        GPT(**{**TINY.arguments, name: value})


def test_heads_that_do_not_divide_the_width_are_refused_with_some_that_do() -> None:
    with pytest.raises(ModelError, match=r"hidden=12 .* heads=5.*use heads=4 or hidden=15"):
        GPT(1, 12, 5, 11, 8)


@pytest.mark.parametrize("tied", ["no", 0, 1, None])
def test_tied_is_true_or_false(tied: Any) -> None:
    with pytest.raises(ModelError, match=f"tied={tied!r}: use True or False"):
        GPT(1, 12, 3, 11, 8, tied=tied)


@pytest.mark.parametrize("size", ["12B", 12, None, ["12b"]])
def test_a_size_that_the_paper_does_not_have_is_refused(size: Any) -> None:
    with pytest.raises(ModelError, match="in the paper: use one of 12b, 24b, 50b, 100b"):
        GPT.paper(size)


@pytest.mark.parametrize("dropout", [-0.1, 1.0, float("nan"), "0.1", False, None])
def test_dropout_must_be_a_chance_below_one(dropout: Any) -> None:
    with pytest.raises(ModelError, match="dropout"):
        GPT(1, 12, 3, 11, 8, dropout=dropout)


def test_building_directly_checks_the_same() -> None:
    with pytest.raises(ModelError, match="heads=5"):
        build(layers=1, hidden=12, heads=5, vocab=11, context=8)


def test_initial_weights_have_the_stated_spread() -> None:
    gpt = GPT(layers=8, hidden=96, heads=4, vocab=500, context=64, tied=False)
    blocks = build_blocks(gpt, range(10), 0)
    embedding, layer, head = blocks[0], blocks[3], blocks[9]
    assert isinstance(embedding, Embedding)
    assert isinstance(layer, Layer)
    assert isinstance(head, Head)
    small = 0.02 / math.sqrt(16)
    for weight, std in (
        (embedding.token.weight, 0.02),
        (embedding.position.weight, 0.02),
        (layer.qkv.weight, 0.02),
        (layer.widen.weight, 0.02),
        (layer.project.weight, small),
        (layer.narrow.weight, small),
        (head.head.weight, 0.02),
    ):
        assert abs(float(weight.detach().std()) / std - 1) < 0.05
    for linear in (layer.qkv, layer.project, layer.widen, layer.narrow):
        assert not linear.bias.any()
    assert head.head.bias is None


def test_the_first_loss_is_that_of_a_uniform_guess() -> None:
    gpt = GPT(2, 64, 4, 256, 32, tied=False)
    targets = tokens(2, 32, vocab=256)
    loss = total(TokenCrossEntropy(), built(gpt)(tokens(2, 32, vocab=256)), targets, 64)
    assert abs(loss.item() - math.log(256)) < 0.1
    assert weigh(TokenCrossEntropy(), targets) == 64


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64])
def test_tokens_of_any_whole_number_type_and_any_length_up_to_the_context_are_taken(
    dtype: torch.dtype,
) -> None:
    model = built(TINY)
    for length in (1, 5, 8):
        batch = tokens(2, length)
        assert torch.equal(model(batch.to(dtype)), model(batch))
        assert model(batch).shape == (2, length, 11)


@pytest.mark.parametrize(
    ("batch", "text"),
    [
        (torch.zeros(1, 9, dtype=torch.long), r"9 tokens for a context of 8.*GPT\(context=9\)"),
        (torch.zeros(1, 4), "float32"),
        (torch.zeros(4, dtype=torch.long), r"shape \(4,\)"),
        (torch.tensor([[0, 11]]), r"from 0 to 11 for a vocabulary of 11: use GPT\(vocab=12\)"),
        (torch.tensor([[-1, 2]]), "from -1 to 2"),
    ],
)
def test_tokens_that_do_not_fit_are_refused_with_the_remedy(batch: torch.Tensor, text: str) -> None:
    with pytest.raises(BatchError, match=text):
        built(TINY)(batch)


def test_dropout_acts_in_training_and_not_in_evaluation() -> None:
    gpt = GPT(2, 12, 3, 11, 8, dropout=0.5)
    model, batch = built(gpt), tokens(1, 8)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_without_dropout_nothing_random_is_drawn() -> None:
    model = built(TINY)
    before = torch.get_rng_state()
    model(tokens(1, 8)).sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


def test_the_heads_cost_grows_with_the_vocabulary_and_the_embedding_stays_cheap() -> None:
    small, large = (describe(GPT(2, 64, 4, vocab, 32)).blocks for vocab in (256, 51200))
    assert len(small) == len(large) == 4
    assert large[3].cost == 200 * small[3].cost == 64 * 51200
    assert large[3].cost > large[1].cost > small[3].cost > small[0].cost > 0
    assert large[0].cost == small[0].cost


def test_a_layers_cost_counts_attention_over_the_context() -> None:
    short, long = (describe(GPT(1, 64, 4, 256, context)).blocks for context in (32, 1024))
    assert short[1].cost == 12 * 64**2 + 2 * 32 * 64
    assert long[1].cost - short[1].cost == 2 * (1024 - 32) * 64


def test_four_steps_of_sgd_lower_the_loss() -> None:
    model, batch = built(TINY), tokens(4, 8)
    losses = []
    for _ in range(5):
        loss = total(TokenCrossEntropy(), model(batch[:, :-1]), batch[:, 1:], 28)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                assert parameter.grad is not None
                parameter.sub_(0.05 * parameter.grad)
                parameter.grad = None
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < losses[0] - 0.05
