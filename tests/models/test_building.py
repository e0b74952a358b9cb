import resource
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from myelin.errors import ModelError
from myelin.models.building import BlockInfo, assemble, build_blocks, describe, outline
from myelin.models.gpt import GPT, Embedding, Head
from myelin.models.model import Description, Model, Parts, Tie, load
from myelin.testing import models

TIED = GPT(layers=3, hidden=12, heads=3, vocab=11, context=8)
UNTIED = GPT(layers=3, hidden=12, heads=3, vocab=11, context=8, tied=False)
DESCRIPTIONS: list[Description] = [
    TIED,
    UNTIED,
    Model(models.mlp, depth=5),
    Model(models.masked, depth=5),
    Model(models.tuple_passing, depth=5),
    Model(models.mixed),
    Model(models.frozen_first),
    Model(models.shared),
    Model(models.dropping, depth=5),
    Model(models.failing, depth=5),
]
MADE: dict[str, Any] = {}


def give() -> Any:
    """Stands for a factory: returns what the test put there."""
    return MADE["it"]()


@pytest.fixture
def describing(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], Model]:
    """Make a description whose factory is the given function."""
    monkeypatch.setitem(sys.modules, "a_factory_to_build", sys.modules[__name__])

    def model(factory: Callable[[], Any]) -> Model:
        MADE["it"] = factory
        return Model("a_factory_to_build:give")

    return model


def state(block: nn.Module) -> dict[str, torch.Tensor]:
    return dict(block.state_dict())


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = state(one), state(other)
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


@given(st.sampled_from(DESCRIPTIONS), st.sets(st.integers(0, 4)), st.integers(0, 2**70))
@settings(deadline=None, max_examples=20)
def test_weights_are_the_same_whatever_subset_is_built(
    description: Description, subset: set[int], seed: int
) -> None:
    count = len(outline(description).blocks)
    whole = build_blocks(description, range(count), seed)
    wanted = {index for index in subset if index < count}
    part = build_blocks(description, wanted, seed)
    assert list(part) == sorted(wanted)
    assert all(same(block, whole[index]) for index, block in part.items())


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda d: d.factory)
def test_another_seed_gives_other_weights(description: Description) -> None:
    indices = range(len(outline(description).blocks))
    one, other = build_blocks(description, indices, 0), build_blocks(description, indices, 1)
    with_weights = [i for i in indices if any(p.ndim > 1 for p in one[i].parameters())]
    assert with_weights
    assert not any(same(one[i], other[i]) for i in with_weights)


def test_layers_of_one_shape_have_different_weights() -> None:
    blocks = build_blocks(TIED, [1, 2], 0)
    assert not same(blocks[1], blocks[2])


@pytest.mark.parametrize("description", [TIED, Model(models.mlp)])
def test_building_neither_reads_nor_changes_the_process_wide_generator(
    description: Description,
) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first = build_blocks(description, [1], 0)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(6)
    assert same(build_blocks(description, [1], 0)[1], first[1])


def test_threads_that_build_at_once_get_the_same_weights() -> None:
    expected = build_blocks(TIED, range(5), 0)
    built: list[dict[int, nn.Module]] = []
    start = threading.Barrier(3)

    def build() -> None:
        start.wait()
        built.extend(build_blocks(TIED, range(5), 0) for _ in range(5))

    threads = [threading.Thread(target=build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 15
    assert all(same(blocks[i], expected[i]) for blocks in built for i in range(5))


def ends(blocks: dict[int, nn.Module]) -> tuple[Embedding, Head]:
    embedding, head = blocks[0], blocks[4]
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    return embedding, head


def test_a_tie_between_blocks_built_here_is_one_parameter() -> None:
    embedding, head = ends(build_blocks(TIED, [0, 4], 0))
    assert head.head.weight is embedding.token.weight


def test_gradients_of_a_tie_built_here_add_up_in_one_place() -> None:
    embedding, head = ends(build_blocks(TIED, [0, 4], 0))
    tokens = torch.tensor([[1, 2]])
    head(embedding(tokens)).sum().backward()
    both = embedding.token.weight.grad
    assert both is not None
    assert both is head.head.weight.grad
    assert both[5].any(), "an unseen token has a gradient from the head"


def test_a_tie_whose_owner_is_elsewhere_starts_with_the_owners_value() -> None:
    embedding = build_blocks(TIED, [0], 7)[0]
    head = build_blocks(TIED, [4], 7)[4]
    assert isinstance(embedding, Embedding)
    assert isinstance(head, Head)
    assert torch.equal(head.head.weight, embedding.token.weight)
    assert head.head.weight is not embedding.token.weight


def test_untied_ends_have_weights_of_their_own() -> None:
    embedding, head = ends(build_blocks(UNTIED, [0, 4], 0))
    assert not torch.equal(head.head.weight, embedding.token.weight)


def test_an_undeclared_shared_parameter_is_shared_here_and_equal_elsewhere() -> None:
    here = build_blocks(Model(models.shared), range(3), 0)
    assert here[0].get_parameter("weight") is here[2].get_parameter("weight")
    elsewhere = build_blocks(Model(models.shared), [2], 0)
    assert same(elsewhere[2], here[2])
    assert outline(Model(models.shared)).ties == (Tie(0, "weight", 2, "weight"),)


class Twice(nn.Module):
    """Holds one parameter under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.two = nn.Linear(3, 3, bias=False)
        self.two.weight = self.one.weight


def test_a_tie_replaces_a_parameter_under_all_its_names(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    tie = Tie(0, "weight", 1, "two.weight")
    model = describing(lambda: Parts((lambda: nn.Linear(3, 3), Twice), functional.mse_loss, (tie,)))
    blocks = build_blocks(model, [0, 1], 0)
    owner = blocks[0].get_parameter("weight")
    assert blocks[1].get_parameter("one.weight") is owner
    assert blocks[1].get_parameter("two.weight") is owner


@pytest.mark.parametrize(
    ("tie", "text"),
    [
        (Tie(0, "wait", 1, "weight"), "no such parameter in block 0"),
        (Tie(0, "weight", 1, "0.weight"), "no such parameter in block 1"),
        (Tie(0, "weight", 1, "weight"), r"shapes \(2, 3\) and \(3, 2\) differ"),
    ],
)
def test_ties_that_do_not_fit_are_refused_when_described_and_when_built(
    tie: Tie, text: str, describing: Callable[[Callable[[], Any]], Model]
) -> None:
    def parts() -> Parts:
        builders = (lambda: nn.Linear(3, 2), lambda: nn.Linear(2, 3))
        return Parts(builders, functional.mse_loss, (tie,))

    with pytest.raises(ModelError, match=text):
        describe(describing(parts))
    with pytest.raises(ModelError, match=text):
        build_blocks(describing(parts), [1], 0)


def test_frozen_blocks_stay_frozen_and_buffers_come_along() -> None:
    blocks = build_blocks(Model(models.mixed), range(4), 0)
    assert not any(p.requires_grad for p in blocks[2].parameters())
    assert "1.running_mean" in state(blocks[0])
    assert not list(blocks[1].parameters())


def test_only_the_wanted_builders_are_called(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    called: list[int] = []

    def builder(index: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            called.append(index)
            return nn.Linear(index + 1, index + 2)

        return build

    model = describing(lambda: ([builder(i) for i in range(6)], functional.mse_loss))
    assert list(build_blocks(model, [4, 1, 4], 0)) == [1, 4]
    assert called == [1, 4]
    assert build_blocks(model, [], 0) == {}


# Several stages of one worker


def parameters(blocks: dict[int, nn.Module]) -> set[nn.Parameter]:
    return {parameter for block in blocks.values() for parameter in block.parameters()}


@pytest.mark.parametrize("description", [*DESCRIPTIONS, Model(models.standing_twice)])
def test_groups_share_no_parameter_and_each_is_as_if_built_alone(description: Description) -> None:
    parts = load(description.factory, description.arguments, seed=3)
    groups = [[0], range(1, len(parts.blocks) - 1), [len(parts.blocks) - 1]]
    made = assemble(parts, groups, 3)
    assert not parameters(made[0]) & parameters(made[1])
    assert not (parameters(made[0]) | parameters(made[1])) & parameters(made[2])
    for indices, built in zip(groups, made, strict=True):
        alone = build_blocks(description, indices, 3)
        assert built.keys() == alone.keys()
        assert all(same(block, alone[index]) for index, block in built.items())


def test_what_blocks_of_a_group_share_they_share_though_another_group_has_it_too(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    shared = nn.Linear(2, 2)
    blocks = [nn.Sequential(shared, nn.Tanh()), nn.Sequential(shared), shared]
    parts = load(describing(lambda: (blocks, functional.mse_loss)).factory, {})
    first, second = assemble(parts, [[0], [1, 2]], 0)
    assert second[1].get_submodule("0") is second[2]
    assert second[2] is not shared
    assert first[0].get_submodule("0") is shared
    assert shared.weight in parameters(first)
    assert same(second[2], shared)


def test_a_tie_to_another_group_leaves_the_owner_alone(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    owner, user = nn.Linear(2, 2), nn.Linear(2, 2)
    owner.requires_grad_(False)
    tie = Tie(0, "weight", 1, "weight")
    model = describing(lambda: Parts((owner, user), functional.mse_loss, (tie,)))
    assemble(load(model.factory, {}), [[0], [1]], 0)
    assert torch.equal(owner.weight, user.weight)
    assert owner.weight is not user.weight
    assert not user.weight.requires_grad


def test_shared_modules_that_cannot_be_copied_are_refused_with_what_to_do_instead(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    block = nn.Linear(2, 2)
    block.lock = threading.Lock()  # type: ignore[assignment]
    parts = load(describing(lambda: ([block, block], functional.mse_loss)).factory, {})
    with pytest.raises(ModelError, match=r"cannot be copied .*return functions that build"):
        assemble(parts, [[0], [1]], 0)
    assert len(assemble(parts, [[0, 1]], 0)) == 1


@pytest.mark.parametrize("indices", [[5], [-1], [0, 99]])
def test_a_block_that_the_model_does_not_have_is_refused(indices: list[int]) -> None:
    with pytest.raises(ModelError, match="blocks 0 to 4"):
        build_blocks(TIED, indices, 0)


def test_a_builder_that_raises_is_named_by_its_block(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    def broken() -> nn.Module:
        raise OSError("planted")

    model = describing(lambda: ([nn.Tanh, broken], functional.mse_loss))
    with pytest.raises(ModelError, match="building block 1 raised OSError: planted") as caught:
        build_blocks(model, [1], 0)
    assert isinstance(caught.value.__cause__, OSError)
    with pytest.raises(ModelError, match="building block 1 raised OSError"):
        describe(model)


@pytest.mark.parametrize(
    ("builder", "text"),
    [
        (lambda: 3, "block 0 returned int"),
        (lambda: nn.LazyLinear(3), "without a shape"),
        (nn.Linear, "without arguments"),
    ],
)
def test_a_builder_that_makes_no_usable_block_is_refused(
    builder: Callable[[], Any], text: str, describing: Callable[[Callable[[], Any]], Model]
) -> None:
    with pytest.raises(ModelError, match=text):
        describe(describing(lambda: ([builder], functional.mse_loss)))


@pytest.mark.parametrize("description", DESCRIPTIONS, ids=lambda d: d.factory)
def test_what_is_described_is_what_is_built(description: Description) -> None:
    sketch, parts = describe(description), load(description.factory, description.arguments)
    assert len(sketch.blocks) == len(parts.blocks)
    assert sketch.ties == parts.ties
    assert all(info.cost > 0 for info in sketch.blocks)


def test_costs_are_estimated_from_weights_but_tables_count_one_row(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    class Own(nn.Linear):
        def cost(self) -> float:
            return 1234.5

    class Zero(nn.Tanh):
        cost = property(lambda self: 3)

    blocks = [
        nn.Linear(3, 5),
        nn.Embedding(1000, 7),
        nn.Tanh(),
        nn.Conv1d(2, 3, 4, bias=False),
        nn.Sequential(nn.Embedding(1000, 7), nn.Linear(7, 2, bias=False)),
        Own(2, 2),
        Zero(),
    ]
    infos = describe(describing(lambda: (blocks, functional.mse_loss))).blocks
    assert [info.cost for info in infos] == [20, 7, 1, 24, 21, 1234.5, 1]


@pytest.mark.parametrize("cost", [-1.0, float("nan"), float("inf")])
def test_a_cost_that_is_no_cost_is_refused_by_block(
    cost: float, describing: Callable[[Callable[[], Any]], Model]
) -> None:
    class Own(nn.Linear):
        def cost(self) -> float:
            return cost

    with pytest.raises(ModelError, match=r"cost\(\) of block 0 \(Own\)"):
        describe(describing(lambda: ([Own(1, 1)], functional.mse_loss)))


@pytest.mark.parametrize("ready_made", [True, False])
def test_what_cannot_be_built_on_the_meta_device_is_described_for_real(
    ready_made: bool, describing: Callable[[Callable[[], Any]], Model]
) -> None:
    def block() -> nn.Module:
        return nn.Linear(3, int(torch.tensor([4.0]).item()))

    model = describing(lambda: ([block() if ready_made else block], functional.mse_loss))
    assert describe(model).blocks == (BlockInfo(16.0),)


def test_describing_allocates_no_block_and_draws_nothing(
    describing: Callable[[Callable[[], Any]], Model],
) -> None:
    devices: list[str] = []

    class Watched(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 4)
            devices.append(self.weight.device.type)

    before = torch.get_rng_state()
    describe(describing(lambda: ([Watched, Watched()], functional.mse_loss)))
    assert devices == ["meta", "meta"]
    assert torch.equal(torch.get_rng_state(), before)


def test_tensors_at_the_top_of_a_factorys_module_are_real_after_describing(tmp_path: Path) -> None:
    path = tmp_path / "with_table.py"
    path.write_text(
        "import torch\n"
        "from torch import nn\n"
        "TABLE = torch.arange(6.0).reshape(2, 3)\n"
        "def build():\n"
        "    return [lambda: nn.Embedding.from_pretrained(TABLE)], nn.MSELoss()\n"
    )
    model = Model(f"{path}:build")
    describe(model)
    assert torch.equal(
        build_blocks(model, [0], 0)[0].get_parameter("weight").sum(), torch.tensor(15.0)
    )


DESCRIBE_100B = """
import resource
import torch
from myelin.models.building import build_blocks, describe
from myelin.models.gpt import GPT
describe(GPT(1, 8, 2, 16, 4))
build_blocks(GPT(1, 8, 2, 16, 4), range(3), 0)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
sketch = describe(GPT.paper("100b"))
after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(int(sum(info.cost for info in sketch.blocks)), (after - before) * 1024)
"""


@pytest.mark.slow
def test_describing_a_hundred_billion_parameters_takes_a_few_megabytes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DESCRIBE_100B], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    cost, growth_bytes = map(int, done.stdout.split())
    assert cost > 100e9
    assert growth_bytes < 50e6


@pytest.mark.slow
def test_one_block_of_a_wide_model_is_built_without_the_others() -> None:
    gpt = GPT(layers=1000, hidden=1024, heads=8, vocab=1000, context=8)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    block = build_blocks(gpt, [500], 0)[500]
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size_bytes = sum(p.numel() * 4 for p in block.parameters())
    assert (after - before) * 1024 < 3 * size_bytes
