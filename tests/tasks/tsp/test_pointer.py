"""Tours and the pointer network, against loops over single cities and computation from scratch."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from fnmatch import fnmatch
from importlib.resources import as_file, files
from itertools import pairwise
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import Tensor
from tours import is_tour

from seqdefer.errors import CheckpointError
from seqdefer.progress import Silent
from seqdefer.tasks.tsp.data import gaussian_instances
from seqdefer.tasks.tsp.experts import make_expert
from seqdefer.tasks.tsp.pointer import PointerNet, TourPredictor, TourState, load_pointer, save_pointer
from seqdefer.tasks.tsp.reinforce import TrainingOptions
from seqdefer.tasks.tsp.task import greedy_tours, own_tours, shipped_pointer
from seqdefer.tasks.tsp.tours import distances, percent_over, tour_lengths
from seqdefer.testing import check_predictor
from seqdefer.types import Proposal, Sequences, SequenceSpec

pytestmark = pytest.mark.usefixtures("one_thread")
CPU = torch.device("cpu")
HIDDEN = 5
N_FACTS = 11


def make_cities(n: int, n_cities: int, seed: int = 0) -> Tensor:
    return torch.randn(n, n_cities, 2, generator=torch.Generator().manual_seed(seed))


def make_tours(n: int, n_cities: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(n_cities, generator=generator) for _ in range(n)])


def make_net(hidden: int = HIDDEN, seed: int = 3) -> PointerNet:
    """Return an untrained network whose logits reach the range where they are clipped."""
    torch.manual_seed(seed)
    net = PointerNet(hidden).requires_grad_(False)
    for layer in (net.pointer, net.glimpse):
        layer.weight.mul_(12)
    net.begin.normal_()
    return net


# -- tours ---------------------------------------------------------------------------------------------------------


def length_by_loop(cities: Tensor, tour: Tensor) -> float:
    points = cities.tolist()
    order = [points[city] for city in tour.tolist()]
    return sum(math.dist(one, two) for one, two in pairwise([*order, order[0]]))


@pytest.mark.parametrize("n_cities", [4, 9, 50])
def test_lengths_by_a_loop(n_cities: int) -> None:
    cities, tours = make_cities(6, n_cities), make_tours(6, n_cities)
    lengths = tour_lengths(cities, tours)
    assert lengths.dtype == torch.float64
    expected = [length_by_loop(*pair) for pair in zip(cities, tours, strict=True)]
    assert lengths.tolist() == pytest.approx(expected, rel=1e-12)


def test_lengths_are_invariant() -> None:
    cities, tours = make_cities(5, 12), make_tours(5, 12)
    lengths = tour_lengths(cities, tours)
    for same in (tours.roll(1, 1), tours.roll(5, 1), tours.flip(1)):
        torch.testing.assert_close(tour_lengths(cities, same), lengths, rtol=1e-12, atol=0)
    angle = 0.7
    rotation = torch.tensor([[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]])
    for moved in (cities.double() @ rotation.double(), cities.double() + torch.tensor([3.0, -100.0])):
        torch.testing.assert_close(tour_lengths(moved, tours), lengths, rtol=1e-6, atol=0)
    torch.testing.assert_close(tour_lengths(3 * cities.double(), tours), 3 * lengths)


def test_percent_over_by_hand() -> None:
    """A square of side 1: 4 around it, 2 + 2 sqrt(2) crosswise."""
    cities = torch.tensor([[[0.0, 0], [1, 0], [1, 1], [0, 1]]]).expand(3, -1, -1)
    around, across = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 2, 1, 3])
    over = percent_over(cities, torch.stack([across, around, around]), torch.stack([around, around.flip(0), across]))
    assert over.tolist() == pytest.approx([100 * (math.sqrt(2) - 1) / 2, 0, 0])  # never below 0


def test_percent_over_is_never_negative() -> None:
    cities, tours = make_cities(200, 8), make_tours(200, 8)
    reference = make_tours(200, 8, seed=2)
    over = percent_over(cities, tours, reference)
    assert over.dtype == torch.float32
    assert (over >= 0).all()
    shorter = tour_lengths(cities, tours) < tour_lengths(cities, reference)
    assert 50 < shorter.sum() < 150
    assert (over[shorter] == 0).all()
    assert (over[~shorter] > 0).all()


def test_near_cities_keep_their_digits() -> None:
    """Squares of coordinates around 1,000 would lose distances of 1/1000."""
    cities = 1000 + torch.arange(40)[None, :, None] * torch.tensor([1e-3, 0.0])
    exact = (cities[0, :, None].double() - cities[0, None].double()).norm(dim=2)
    torch.testing.assert_close(distances(cities)[0].double(), exact, rtol=1e-6, atol=0)


# -- the network, from scratch -------------------------------------------------------------------------------------


@torch.no_grad()
def from_scratch(net: PointerNet, cities: Tensor, prefix: list[int]) -> tuple[list[float], Tensor, Tensor]:
    """Return log probabilities of the next city of one instance (N, 2), the decoder's state (H,) and the nodes (N, H),
    computed city by city, without batches, caches or masks."""
    n, middle = len(cities), cities.mean(0).tolist()
    angles = [math.atan2(y - middle[1], x - middle[0]) for x, y in cities.tolist()]
    nodes, state = torch.zeros(n, net.hidden), None
    for city in sorted(range(n), key=lambda city: angles[city]):
        read, state = net.encoder(net.embed(cities[city])[None, None], state)
        nodes[city] = read[0, 0]
    assert state is not None
    hidden, memory = net.decoder(net.begin[None], (state[0][0], state[1][0]))
    for city in prefix:
        hidden, memory = net.decoder(net.embed(cities[city])[None], (hidden, memory))
    free = [city for city in range(n) if city not in prefix]
    aimed = [net.glimpse(torch.tanh(net.glimpse_key(nodes[city]) + net.glimpse_query(hidden[0]))) for city in free]
    weights = [math.exp(float(value)) for value in aimed]
    glimpse = sum(weight * nodes[city] for weight, city in zip(weights, free, strict=True)) / sum(weights)
    query = net.pointer_query(glimpse + hidden[0])
    logits = {
        city: 10 * math.tanh(float(net.pointer(torch.tanh(net.pointer_key(nodes[city]) + query)))) for city in free
    }
    total = math.log(sum(math.exp(value) for value in logits.values()))
    return [logits[city] - total if city in logits else -math.inf for city in range(n)], hidden[0], nodes


@torch.no_grad()
def along(
    predictor: TourPredictor, cities: Tensor, tours: Tensor | None = None
) -> Iterator[tuple[TourState, Proposal]]:
    """Yield state and proposal at every position along `tours`, or along the proposals."""
    state, _ = predictor.start(cities)
    for position in range(cities.shape[1]):
        proposal = predictor.propose(state)
        yield state, proposal
        state = predictor.append(state, proposal.tokens if tours is None else tours[:, position])


@pytest.mark.parametrize("n_cities", [4, 5, 9])
def test_every_step_equals_a_run_from_scratch(n_cities: int) -> None:
    """Along tours of another author."""
    predictor, cities, tours = TourPredictor(make_net()), make_cities(4, n_cities), make_tours(4, n_cities)
    surest = 0.0
    for position, (state, proposal) in enumerate(along(predictor, cities, tours)):
        for row in range(4):
            expected, hidden, _ = from_scratch(predictor.model, cities[row], tours[row, :position].tolist())
            torch.testing.assert_close(state.log_probs[row], torch.tensor(expected), rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(proposal.features[row, :HIDDEN], hidden, rtol=1e-4, atol=1e-5)
            assert int(proposal.tokens[row]) == max(range(n_cities), key=lambda city: expected[city])
            known = [value for value in expected if value > -math.inf]
            assert float(proposal.uncertainty[row]) == pytest.approx(-max(known), abs=1e-4)
            assert proposal.entropy is not None
            entropy = -sum(math.exp(value) * value for value in known)
            assert float(proposal.entropy[row]) == pytest.approx(entropy, abs=1e-4)
            surest = max(surest, max(known) - min(known))
    assert surest > 5, "the clipped logits were not tested"


def test_the_last_city_is_certain() -> None:
    """One city remains: uncertainty 0, and no NaN."""
    *_, (_, proposal) = along(TourPredictor(make_net()), make_cities(6, 10), make_tours(6, 10))
    assert torch.equal(proposal.tokens, make_tours(6, 10)[:, -1])
    assert proposal.uncertainty.tolist() == [0.0] * 6
    assert proposal.entropy is not None
    assert proposal.entropy.tolist() == [0.0] * 6


@pytest.mark.parametrize("n_cities", [4, 5, 6, 17, 50])
def test_greedy_tours_are_tours(n_cities: int) -> None:
    cities = make_cities(20, n_cities)
    tours = greedy_tours(make_net(), cities, CPU)
    assert tours.shape == (20, n_cities)
    assert is_tour(tours).all()
    assert len(tours.unique(dim=0)) > 10
    proposed = torch.stack([proposal.tokens for _, proposal in along(TourPredictor(make_net()), cities)], 1)
    assert torch.equal(tours, proposed)


@pytest.mark.parametrize("net", [make_net, lambda: shipped_pointer(CPU)], ids=["made up", "shipped"])
def test_the_tour_does_not_depend_on_the_order_of_cities(net: Callable[[], PointerNet]) -> None:
    predictor, cities = TourPredictor(net()), make_cities(20, 15)
    order = make_tours(20, 15, seed=7)
    listed = cities.gather(1, order[..., None].expand(-1, -1, 2))
    contexts = [predictor.start(each)[1] for each in (cities, listed)]
    torch.testing.assert_close(*contexts, rtol=1e-4, atol=1e-5)
    for (_, one), (_, other) in zip(along(predictor, cities), along(predictor, listed), strict=True):
        assert torch.equal(order.gather(1, other.tokens[:, None]).squeeze(1), one.tokens)
        torch.testing.assert_close(other.features, one.features, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(other.uncertainty, one.uncertainty, rtol=1e-3, atol=1e-4)


def test_cities_at_the_same_angle() -> None:
    """Ties in the angle, and a city at the center: cities are read in their given order, in any batch."""
    grid = torch.stack(torch.meshgrid(torch.arange(5.0), torch.arange(5.0), indexing="ij"), -1).view(1, 25, 2) - 2
    cities = torch.cat([grid, make_cities(3, 25), grid])
    check_predictor(TourPredictor(make_net()), cities, SequenceSpec(25))
    tours = greedy_tours(make_net(), cities, CPU)
    assert is_tour(tours).all()
    assert torch.equal(tours[0], tours[-1])


@pytest.mark.parametrize("facts", [True, False])
@pytest.mark.parametrize("n_cities", [4, 11])
def test_contract(facts: bool, n_cities: int) -> None:
    predictor, cities = TourPredictor(make_net(), facts=facts), make_cities(5, n_cities)
    check_predictor(predictor, cities, SequenceSpec(n_cities))
    foreign = Sequences(make_tours(5, n_cities), torch.full((5,), n_cities))
    check_predictor(predictor, cities, SequenceSpec(n_cities), paths=foreign)


def test_the_predictor_is_frozen_and_named() -> None:
    predictor = TourPredictor(make_net())
    assert not any(weight.requires_grad for weight in predictor.model.parameters())
    assert not predictor.model.training
    others = [TourPredictor(make_net(), facts=False), TourPredictor(make_net(seed=4)), TourPredictor(make_net(6))]
    assert TourPredictor(make_net()).fingerprint == predictor.fingerprint
    assert len({predictor.fingerprint, *(other.fingerprint for other in others)}) == 4


# -- what rejectors see --------------------------------------------------------------------------------------------


def facts_by_loop(points: list[list[float]], prefix: list[int], token: int) -> list[float]:
    """Compute each fact of the partial tour by itself."""
    n = len(points)
    free = [city for city in range(n) if city not in prefix]
    here, start = (prefix[-1], prefix[0]) if prefix else (token, token)
    away = {city: math.dist(points[here], points[city]) for city in free}
    step, nearest = away[token], min(away.values())
    waiting = {*free, here, start}  # the rest of the tour touches these
    gaps = [min(math.dist(points[city], points[other]) for other in waiting if other != city) for city in free]
    return [
        step,
        nearest,
        step - nearest,
        sum(far < step for far in away.values()) / n,
        sum(away.values()) / len(free),
        math.dist(points[here], points[start]),
        math.dist(points[token], points[start]),
        *points[token],
        sum(gaps) / len(free),
        len(free) / n,
    ]


@pytest.mark.parametrize("foreign", [True, False], ids=["along foreign tours", "along its own"])
@pytest.mark.parametrize("n_cities", [4, 5, 12])
def test_facts_by_loops(n_cities: int, foreign: bool) -> None:
    predictor, cities = TourPredictor(make_net()), make_cities(8, n_cities)
    tours = make_tours(8, n_cities) if foreign else greedy_tours(predictor.model, cities, CPU)
    for position, (_, proposal) in enumerate(along(predictor, cities, tours)):
        assert proposal.features.shape == (8, HIDDEN + N_FACTS)
        for row in range(8):
            prefix, token = tours[row, :position].tolist(), int(proposal.tokens[row])
            expected = torch.tensor(facts_by_loop(cities[row].tolist(), prefix, token))
            torch.testing.assert_close(proposal.features[row, HIDDEN:], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n_cities", [4, 5, 50])
def test_features_are_finite(n_cities: int) -> None:
    """For cities on a line, on a circle, far apart, or almost equal."""
    line = torch.stack([torch.arange(n_cities) * 1.0, torch.zeros(n_cities)], 1)
    circle = 2 * math.pi * torch.arange(n_cities) / n_cities
    ring = torch.stack([circle.cos(), circle.sin()], 1)
    cities = torch.stack([line, ring, 1e6 * ring, 1e-6 * ring, make_cities(1, n_cities)[0]])
    for facts in (True, False):
        for _, proposal in along(TourPredictor(make_net(), facts=facts), cities):
            assert proposal.features.isfinite().all()
            assert proposal.uncertainty.isfinite().all()
            assert proposal.entropy is not None
            assert (proposal.entropy >= 0).all()
            assert (proposal.entropy <= math.log(n_cities) + 1e-5).all()


def test_what_rejectors_see_without_facts() -> None:
    """Features are the embedding of the proposed city; the context is the mean of all and the encoder's last state."""
    predictor, cities, tours = TourPredictor(make_net(), facts=False), make_cities(3, 7), make_tours(3, 7)
    _, context = predictor.start(cities)
    for position, (_, proposal) in enumerate(along(predictor, cities, tours)):
        for row in range(3):
            _, _, nodes = from_scratch(predictor.model, cities[row], tours[row, :position].tolist())
            torch.testing.assert_close(proposal.features[row], nodes[int(proposal.tokens[row])], rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(context[row, :HIDDEN], nodes.mean(0), rtol=1e-4, atol=1e-5)
    middle = cities - cities.mean(1, keepdim=True)
    last = torch.atan2(middle[..., 1], middle[..., 0]).argmax(1)
    for row in range(3):  # the encoder stops at the city with the largest angle
        nodes = from_scratch(predictor.model, cities[row], [])[2]
        torch.testing.assert_close(context[row, HIDDEN:], nodes[last[row]], rtol=1e-4, atol=1e-5)


# -- on disk -------------------------------------------------------------------------------------------------------


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    net = make_net()
    save_pointer(net, tmp_path, {"gap": 12.5})
    found = load_pointer(tmp_path, CPU)
    assert TourPredictor(found).fingerprint == TourPredictor(net).fingerprint
    assert torch.equal(greedy_tours(found, make_cities(9, 8), CPU), greedy_tours(net, make_cities(9, 8), CPU))
    assert json.loads((tmp_path / "config.json").read_text())["notes"] == {"gap": 12.5}
    save_pointer(make_net(6), tmp_path, {})
    assert load_pointer(tmp_path, CPU).hidden == 6
    assert {path.name for path in tmp_path.iterdir()} == {"config.json", "model.safetensors"}


def without_a_tensor(folder: Path) -> None:
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file({k: v for k, v in tensors.items() if k != "begin"}, folder / "model.safetensors")


def not_finite(folder: Path) -> None:
    net = make_net()
    net.begin[1] = torch.nan
    save_pointer(net, folder, {})


def config(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "config.json").write_text(text)

    return write


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "no config": (lambda folder: (folder / "config.json").unlink(), "train one with: seqdefer train-predictor tsp"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "cannot read"),
    "a tensor not there": (without_a_tensor, "is damaged"),
    "weights that are no numbers": (not_finite, "is damaged: not all weights are finite"),
    "another size": (config('{"kind": "tsp_pointer", "hidden": 6}'), "is damaged"),
    "not JSON": (config("{"), "cannot read"),
    "a list": (config("[]"), "does not describe a pointer network"),
    "of a rejector": (config('{"kind": "lstm", "hidden": 5}'), "does not describe a pointer network"),
    "no size": (config('{"kind": "tsp_pointer"}'), "does not describe a pointer network"),
    "size 0": (config('{"kind": "tsp_pointer", "hidden": 0}'), "does not describe a pointer network"),
    "size true": (config('{"kind": "tsp_pointer", "hidden": true}'), "does not describe a pointer network"),
    "size too large": (config(f'{{"kind": "tsp_pointer", "hidden": {10**30}}}'), "does not describe a pointer network"),
}


@pytest.mark.parametrize(("damage", "says"), DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_or_foreign_checkpoint_is_refused_in_one_line(
    damage: Callable[[Path], None], says: str, tmp_path: Path
) -> None:
    save_pointer(make_net(), tmp_path, {})
    damage(tmp_path)
    with pytest.raises(CheckpointError, match=says) as caught:
        load_pointer(tmp_path, CPU)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


# -- the checkpoint that is shipped --------------------------------------------------------------------------------


def test_the_shipped_checkpoint_is_unchanged() -> None:
    """Fitted rejectors and the figures in the docs belong to these weights."""
    with as_file(files("seqdefer.tasks.tsp") / "pointer-50") as folder:
        assert sum(path.stat().st_size for path in folder.iterdir()) < 2_000_000
    net = shipped_pointer(CPU)
    assert TourPredictor(net).fingerprint == "e2c38896678c03a9"
    assert all(weight.isfinite().all() for weight in net.parameters())


def test_the_shipped_checkpoint_notes_its_options() -> None:
    notes = json.loads((files("seqdefer.tasks.tsp") / "pointer-50" / "config.json").read_text())["notes"]
    assert notes["options"] == asdict(TrainingOptions())
    assert 10 < notes["gap"] < 15


def test_the_shipped_checkpoint_is_about_as_good_as_the_papers(tmp_path: Path) -> None:
    """About 12 % over the expert, on instances that it was neither trained nor measured on."""
    pytest.importorskip("numba", reason="needs the extra tsp")
    cities = gaussian_instances(200, 50, seed=20_240_607, stream="test")
    best = own_tours(make_expert("search"), cities, tmp_path, Silent(), "solve")
    over = percent_over(cities, greedy_tours(shipped_pointer(CPU), cities, CPU), best)
    assert 10 < float(over.mean()) < 15


def test_the_checkpoint_is_declared_as_package_data() -> None:
    root = Path(__file__).parents[3]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    package = root / "seqdefer" / "tasks" / "tsp"
    shipped = [path.relative_to(package) for path in (package / "pointer-50").iterdir()]
    assert {path.name for path in shipped} == {"config.json", "model.safetensors"}
    for path in shipped:
        assert any(fnmatch(path.as_posix(), pattern) for pattern in declared["seqdefer.tasks.tsp"]), path


# -- on a GPU ------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu() -> None:
    cities, gpu = make_cities(64, 20), torch.device("cuda")
    one, other = TourPredictor(shipped_pointer(CPU)), TourPredictor(shipped_pointer(gpu))
    assert other.device.type == "cuda"
    assert one.fingerprint == other.fingerprint
    check_predictor(other, cities[:4].cuda(), SequenceSpec(20))
    tours = greedy_tours(other.model, cities, gpu)
    assert not tours.is_cuda
    assert is_tour(tours).all()
    assert (tours == greedy_tours(one.model, cities, CPU)).all(1).double().mean() > 0.9  # rounding may turn a tie
    for (_, here), (_, there) in zip(along(one, cities, tours), along(other, cities.cuda(), tours.cuda()), strict=True):
        assert there.features.is_cuda
        same = here.tokens == there.tokens.cpu()
        assert same.double().mean() > 0.9
        torch.testing.assert_close(here.features[same], there.features.cpu()[same], rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(here.uncertainty, there.uncertainty.cpu(), rtol=1e-2, atol=1e-2)
