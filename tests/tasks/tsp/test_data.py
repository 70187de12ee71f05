"""Instances of the traveling salesman problem: generated, drawn from a map, read from files, split."""

from __future__ import annotations

import gzip
import math
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from seqdefer.errors import DataError, InputError, OptionError
from seqdefer.tasks.tsp import data, reading
from seqdefer.tasks.tsp.data import (
    gaussian_instances,
    instances_from_pool,
    make_splits,
    normalise,
    split_instances,
    stack_instances,
)

pytestmark = pytest.mark.usefixtures("one_thread")

SQUARE = [(0.0, 0.0), (1.0, 0.0), (1.0, 2.0), (0.0, 2.5)]
HEADER = "NAME : map\nTYPE : TSP\nCOMMENT : made up\nDIMENSION : 4\nEDGE_WEIGHT_TYPE : EUC_2D\n"
COORDINATES = "NODE_COORD_SECTION\n1 0 0\n2 1 0\n3 1 2\n4 0 2.5\n"
TSPLIB = f"{HEADER}{COORDINATES}EOF\n"


def read_instances(path: Path | str) -> Tensor:
    return stack_instances(reading.read_cities(path))


@dataclass(frozen=True)
class Options:
    data: str | None = None
    cities: int = 4
    train: int = 6
    validation: int = 2
    test: int = 3
    seed: int = 0


def write(path: Path, text: str | bytes) -> Path:
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def write_tsplib(path: Path, cities: torch.Tensor) -> Path:
    rows = "".join(f"{number} {x!r} {y!r}\n" for number, (x, y) in enumerate(cities.tolist(), start=1))
    header = HEADER.replace("DIMENSION : 4", f"DIMENSION : {len(cities)}")
    return write(path, f"{header}NODE_COORD_SECTION\n{rows}EOF\n")


def write_many(path: Path, instances: torch.Tensor) -> Path:
    rows = [f"{row},{x!r},{y!r}" for row, cities in enumerate(instances.tolist()) for x, y in cities]
    return write(path, "\n".join(["instance,x,y", *rows]))


def as_set(instances: torch.Tensor) -> set[bytes]:
    return {instance.numpy().tobytes() for instance in instances}


# --- made by seed ----------------------------------------------------------------------------------------------------


def test_gaussian_instances_are_standard_normal() -> None:
    instances = gaussian_instances(2000, 50, seed=0)
    assert instances.shape == (2000, 50, 2)
    assert instances.dtype == torch.float32
    flat = instances.double().reshape(-1, 2)
    assert flat.mean(0).abs().max() < 0.01  # five standard errors of 100,000 numbers are 0.016
    assert (flat.T.cov() - torch.eye(2)).abs().max() < 0.02
    assert (flat.pow(4).mean(0) - 3).abs().max() < 0.15
    assert abs(float((flat.abs() < 1).double().mean()) - 0.6827) < 0.005


def test_the_instances_of_a_seed_never_change() -> None:
    """Labels and results are named by the seed, so other versions of numpy or torch must give the same instances."""
    wanted = torch.tensor([[1.5754622, 0.2691034], [0.43758, -0.9157804]])
    torch.testing.assert_close(gaussian_instances(1, 4, seed=0)[0, :2], wanted, rtol=0, atol=1e-6)


def test_instances_depend_on_seed_stream_and_index_alone() -> None:
    torch.manual_seed(1)
    many = gaussian_instances(100, 7, seed=3)
    torch.manual_seed(2)
    assert gaussian_instances(10, 7, seed=3).equal(many[:10])


def test_seeds_and_streams_share_no_city() -> None:
    made = [
        gaussian_instances(20, 5, seed, stream) for seed in (0, 1) for stream in ("predictor", "train", "validation")
    ]
    cities = torch.cat(made).reshape(-1, 2)
    assert len(cities.unique(dim=0)) == len(cities)


@pytest.mark.parametrize(("n", "n_cities", "seed"), [(0, 5, 0), (1, 3, 0), (1, 5, -1)])
def test_sizes_and_seeds_out_of_range(n: int, n_cities: int, seed: int) -> None:
    with pytest.raises(OptionError, match="at least"):
        gaussian_instances(n, n_cities, seed)


# --- drawn from a map ------------------------------------------------------------------------------------------------


def test_instances_of_a_map_are_different_cities_normalised() -> None:
    cities = torch.rand(40, 2, dtype=torch.float64) * torch.tensor([3000.0, 1000.0]) + 5e5
    drawn = instances_from_pool(cities, 50, 30, seed=0)
    assert drawn.shape == (50, 30, 2)
    assert all(len(instance.unique(dim=0)) == 30 for instance in drawn)
    assert drawn.mean(1).abs().max() < 1e-5
    torch.testing.assert_close(drawn.square().mean((1, 2)), torch.ones(50))
    assert (drawn.std(1)[:, 0] > 1.5 * drawn.std(1)[:, 1]).all()  # the map keeps its shape
    assert instances_from_pool(cities, 7, 30, seed=0).equal(drawn[:7])
    assert not as_set(drawn) & as_set(instances_from_pool(cities, 50, 30, seed=0, stream="test"))


def test_subsets_and_orders_are_uniform() -> None:
    n = 6000
    cities = torch.tensor([(0.0, 0), (1, 0), (0, 1), (3, 1), (5, 2), (2, 7)], dtype=torch.float64)
    subsets = {tuple(map(tuple, normalise(cities[list(rows)]).tolist())): rows for rows in combinations(range(6), 4)}
    places = {frozenset(cities): rows for cities, rows in subsets.items()}
    drawn = [tuple(map(tuple, instance.tolist())) for instance in instances_from_pool(cities, n, 4, seed=0)]
    counts = Counter(places[_nearest(cities, places)] for cities in drawn)
    assert len(counts) == 15
    assert all(abs(count - n / 15) < 5 * (n / 15) ** 0.5 for count in counts.values())
    is_smallest_first = sum(cities[0] == min(cities) for cities in drawn)
    assert abs(is_smallest_first - n / 4) < 5 * (n / 4) ** 0.5


def _nearest(
    cities: tuple[tuple[float, ...], ...], places: dict[frozenset[tuple[float, ...]], tuple[int, ...]]
) -> frozenset[tuple[float, ...]]:
    """Return the subset of a drawn instance, up to rounding."""

    def distance(place: frozenset[tuple[float, ...]]) -> float:
        return sum(min(abs(x - u) + abs(y - v) for u, v in place) for x, y in cities)

    return min(places, key=distance)


def test_a_map_cannot_give_more_cities_than_it_has() -> None:
    with pytest.raises(OptionError, match="cannot draw 6 distinct cities from 5; draw at most 5"):
        instances_from_pool(torch.rand(5, 2), 1, 6, seed=0)
    near = torch.tensor([[0.0, 0.0], [0.0, 5.0], [4.0, 1.0], [4.0, 1.0 + 1e-12]], dtype=torch.float64)
    with pytest.raises(DataError, match=r"too close to distinguish: \(4.0, 1.0\S*\) and \(4.0, 1.0\S*\); remove"):
        instances_from_pool(near, 1, 4, seed=0)


@pytest.mark.parametrize(("scale", "shift"), [(1e-300, 0.0), (1e-3, 100.0), (1e99, 0.0)])
def test_normalise_removes_the_unit(scale: float, shift: float) -> None:
    cities = torch.tensor(SQUARE, dtype=torch.float64)
    torch.testing.assert_close(normalise(cities * scale + shift), normalise(cities))


def test_normalise_of_equal_cities_is_finite() -> None:
    assert normalise(torch.ones(3, 4, 2)).equal(torch.zeros(3, 4, 2))


# --- TSPLIB ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        TSPLIB,
        HEADER + COORDINATES,  # EOF may be absent
        TSPLIB.replace(" : ", ":"),
        TSPLIB.replace(" : ", ": ").replace("\n", "\r\n"),
        TSPLIB.replace("TYPE : TSP\n", "TYPE : TSP (M. Hofmeister)\n"),
        TSPLIB.replace("made up", "h\u00f6he"),
        TSPLIB.replace("1 0 0\n2 1 0", "  1   0.0e+00\t0\n\n# two\n2 +1.E0 -0"),
        TSPLIB.replace("1 0 0\n2 1 0\n3 1 2\n4 0 2.5", "0 1 2\n7 .0 25e-1\n-8 0 0\n-2 1 0"),  # any numbers, any order
        TSPLIB.replace("EDGE_W", "NODE_COORD_TYPE : TWOD_COORDS\nDISPLAY_DATA_TYPE : COORD_DISPLAY\nEDGE_W"),
        TSPLIB + "whatever follows\n",
    ],
)
@pytest.mark.parametrize("name", ["map.tsp", "map.txt"])
def test_tsplib_layouts_read_the_same(tmp_path: Path, text: str, name: str) -> None:
    instances = read_instances(write(tmp_path / name, text))
    assert instances.dtype == torch.float64
    assert instances.tolist() == [[list(city) for city in SQUARE]]


def test_old_comments_and_gzip(tmp_path: Path) -> None:
    packed = gzip.compress(TSPLIB.replace("made up", "Gr\u00f6tschel").encode("latin-1"))
    assert read_instances(write(tmp_path / "map.tsp.gz", packed)).shape == (1, 4, 2)
    assert read_instances(write(tmp_path / "map.tsp", packed)).shape == (1, 4, 2)  # known by its content


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("TYPE : TSP", "TYPE : ATSP", r"line 2: TYPE is 'ATSP'; supported is TSP"),
        ("TYPE : TSP", "TYPE : CVRP", r"line 2: TYPE is 'CVRP'"),
        ("EUC_2D", "GEO", r"line 5: EDGE_WEIGHT_TYPE is 'GEO'; supported is EUC_2D"),
        ("EUC_2D", "ATT", r"EDGE_WEIGHT_TYPE is 'ATT'"),
        ("EUC_2D", "CEIL_2D", r"EDGE_WEIGHT_TYPE is 'CEIL_2D'"),
        ("EUC_2D", "EXPLICIT", r"EDGE_WEIGHT_TYPE is 'EXPLICIT'"),
        ("EUC_2D", "", r"EDGE_WEIGHT_TYPE is ''"),
        ("EDGE", "NODE_COORD_TYPE : THREED_COORDS\nEDGE", r"NODE_COORD_TYPE is 'THREED_COORDS'"),
        ("EOF", "FIXED_EDGES_SECTION\n1 2\n-1\nEOF", r"line 11: 'FIXED_EDGES_SECTION' is not supported"),
        ("NODE_COORD", "EDGE_WEIGHT", r"line 6: 'EDGE_WEIGHT_SECTION' is not supported"),
        ("DIMENSION : 4", "DIMENSION : 5", r"DIMENSION is '5', but the NODE_COORD_SECTION has 4 cities"),
        ("4 0 2.5\nEOF\n", "", r"DIMENSION is '4', but the NODE_COORD_SECTION has 3 cities; the file is truncated"),
        ("4 0 2.5\nEOF\n", "4 0", r"line 10: expected a number, x and y, not '4 0'"),
        ("DIMENSION : 4\n", "", r"has no DIMENSION; give a complete TSPLIB file"),
        (COORDINATES, "", r"has no NODE_COORD_SECTION"),
        (TSPLIB, "hello: there", r"has no TYPE and no DIMENSION and no EDGE_WEIGHT_TYPE and no NODE_COORD_SECTION"),
        (TSPLIB, "hello there", r"line 1: cannot read 'hello there'"),
        (TSPLIB, "", r"map\.tsp is empty"),
        ("3 1 2", "2 1 2", r"line 9: city 2 is already on line 8"),
        ("3 1 2", "3.5 1 2", r"line 9: the city's number is '3\.5'"),
        ("3 1 2", f"{'9' * 5000} 1 2", r"line 9: the city's number is '9+…'"),
        ("3 1 2", "3 1_0 2", r"line 9: the coordinate '1_0' is not a number"),
        ("3 1 2", "3 1 nan", r"line 9: the coordinate 'nan' is not finite"),
        ("3 1 2", "3 1 1e160", r"line 9: the coordinate '1e160' is beyond ±1e\+100"),
        ("3 1 2", "3 1 0", r"map\.tsp: the cities on lines 8 and 9 are both at \(1\.0, 0\.0\); remove one"),
        ("3 1 2", "3 1 1e-12", r"map\.tsp: the cities on lines 8 and 9 are too close at \(1\.0, 0\.0\)"),
    ],
)
def test_tsplib_that_cannot_be_used(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in TSPLIB
    path = write(tmp_path / "map.tsp", TSPLIB.replace(old, new, 1))
    with pytest.raises(DataError, match=message) as caught:
        read_instances(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\x89PNG\r\n\x1a\n\x00\x00", r"is not a text file"),
        (TSPLIB.encode("utf-16"), r"is not a text file.*UTF-8"),
        (b"PK\x03\x04whatever", r"is a zip archive: unpack it"),
        (b"\x1f\x8bnot gzip at all", r"cannot read .*map\.tsp"),
        (gzip.compress(TSPLIB.encode(), mtime=0)[:-9], r"cannot read .*map\.tsp"),
    ],
    ids=["picture", "wide letters", "archive", "no gzip", "cut short"],
)
def test_files_that_are_not_text(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_instances(write(tmp_path / "map.tsp", content))


def test_missing_and_oversized_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"cannot read .*nowhere\.tsp: No such file"):
        read_instances(tmp_path / "nowhere.tsp")
    with pytest.raises(DataError, match="--data is empty"):
        read_instances("")
    with pytest.raises(DataError, match="cannot read"):
        read_instances("x" * 5000)
    monkeypatch.setattr(reading, "MAX_FILE_MIB", 1)
    blank = b" " * (2**20 + 1)
    for content in (blank, gzip.compress(blank)):
        with pytest.raises(DataError, match=r"map\.tsp is larger than 1 MiB; .* SEQDEFER_MAX_DATA_MIB=N"):
            read_instances(write(tmp_path / "map.tsp", content))


# --- folders ---------------------------------------------------------------------------------------------------------


def test_files_of_a_folder_are_limited_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The packed sizes were added up, so that a folder of small files could unpack to any size."""
    monkeypatch.setattr(reading, "MAX_FILE_MIB", 1)
    for name in "abc":
        write(tmp_path / f"{name}.tsp", gzip.compress(TSPLIB.encode() + b"\n" * 2**19))
    with pytest.raises(DataError, match=r"larger than 1 MiB; give fewer cities, or fewer instances, or allow more"):
        read_instances(tmp_path)


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    write(tmp_path / "b.tsp", TSPLIB.replace("4 0 2.5", "4 0 9"))
    write(tmp_path / "a.TSP.gz", gzip.compress(TSPLIB.encode()))
    write(tmp_path / "readme.txt", "no instance")
    write(tmp_path / "._a.tsp", b"\x00")
    assert read_instances(tmp_path)[:, 3].tolist() == [[0, 2.5], [0, 9]]


def test_folders_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no TSPLIB files \(\*\.tsp"):
        read_instances(tmp_path)
    write(tmp_path / "a.tsp", TSPLIB)
    write_tsplib(tmp_path / "b.tsp", gaussian_instances(1, 5, seed=0)[0])
    with pytest.raises(DataError, match=r"differ in size: a\.tsp has 4 cities, b\.tsp has 5 cities"):
        read_instances(tmp_path)


# --- CSV -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "x,y\n0,0\n1,0\n1,2\n0,2.5\n",
        "0,0\n1,0\n1,2\n0,2.5",
        '\ufeff"X" , "Y"\r\n0,0\r\n\r\n1,0\r\n1, 2\r\n0,2.5\r\n',
        "# made up\nx;y\n0;0\n1;0\n1;2\n0;2,5\n",
        "x\ty\n0\t0\n1\t0\n# two\n1\t2\n0\t2.5\n",
        "x y\n0 0\n 1   0 \n1 2\n0 2.5e0\n",
        "city,y,name,x\n1,0,a,0\n2,0,b,1\n3,2,c,1\n4,2.5,d,0\n",
        "instance,x,y\na,0,0\na,1,0\na,1,2\na,0,2.5\n",
    ],
)
def test_csv_layouts_of_one_instance_read_the_same(tmp_path: Path, text: str) -> None:
    assert read_instances(write(tmp_path / "cities.csv", text)).tolist() == [[list(city) for city in SQUARE]]


def test_csv_of_many_instances(tmp_path: Path) -> None:
    rows = [f"{x},{name},{y + shift}" for x, y in SQUARE for name, shift in (("b", 1.0), ("a", 0.0))]  # interleaved
    instances = read_instances(write(tmp_path / "many.csv", "\n".join(["x,Instance,y", *rows])))
    square = torch.tensor(SQUARE, dtype=torch.float64)
    assert instances.equal(torch.stack([square + torch.tensor([0.0, 1.0]), square]))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x,y\n0,0\n1,0\n1,2\n", r"cities\.csv: 3 cities; a tour needs at least 4"),
        ("a,b\n1,2\n", r"has no columns 'x' and 'y'; its first line is 'a', 'b'"),
        ("1,0,0\n1,1,0\n", r"has 3 columns and no header; begin with a line such as 'instance,x,y'"),
        ("x,y\n", r"has a header and no rows"),
        ("# x\n#y", r"has only comments"),
        ("x,y\n0,0\n1,\n", r"line 3: a cell is empty or missing; the row is '1', ''"),
        ("instance\tx\ty\n\t0\t0\n", r"line 2: a cell is empty"),
        ("x,y\n0,0\n\n1,a\x1b[31m\n", r"line 4: the coordinate 'a\\x1b\[31m' is not a number"),
        ("nan,0\n", r"line 1: the coordinate 'nan' is not finite"),
        ("x,y\n0,0\n1,0\n1,2\n0,0\n", r"the cities on lines 2 and 5 are both at \(0\.0, 0\.0\)"),
        ("x,y\n0,0\n\u0661,0\n", r"is not a number"),
        (f'x,y\n0,"{"1" * 200_000}\n', r"not a CSV file"),
    ],
)
def test_csv_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message) as caught:
        read_instances(write(tmp_path / "cities.csv", text))
    assert "\n" not in str(caught.value)


def test_the_instance_with_a_duplicate_is_named(tmp_path: Path) -> None:
    instances = gaussian_instances(3, 5, seed=0)
    instances[1, 4] = instances[1, 2]
    with pytest.raises(DataError, match=r"many\.csv, instance '1': the cities on lines 9 and 11 are both at"):
        read_instances(write_many(tmp_path / "many.csv", instances))


def test_instances_of_different_sizes(tmp_path: Path) -> None:
    path = write_many(tmp_path / "many.csv", gaussian_instances(2, 5, seed=0))
    path.write_text(path.read_text().rpartition("\n")[0])
    with pytest.raises(DataError, match=r"many\.csv, instance '0' has 5 cities, many\.csv, instance '1' has 4 cities"):
        read_instances(path)


@settings(max_examples=150)
@given(content=st.one_of(st.binary(max_size=60), st.text("xy,;\t 0123.e-#nan\n\"'", max_size=60).map(str.encode)))
@pytest.mark.parametrize("name", ["a.csv", "a.tsp"])
def test_any_file_is_read_or_refused(tmp_path_factory: pytest.TempPathFactory, name: str, content: bytes) -> None:
    path = write(tmp_path_factory.getbasetemp() / name, content)
    with suppress(DataError):
        assert read_instances(path).isfinite().all()


# --- pools and splits ------------------------------------------------------------------------------------------------


def test_a_pool_keeps_the_first_of_equal_cities(tmp_path: Path) -> None:
    cities = gaussian_instances(1, 30, seed=0)[0].double()
    doubled = torch.cat([cities, cities[:3], cities[3:4] + 1e-9])
    pool = data._pool_of(reading.read_cities(write_tsplib(tmp_path / "map.tsp", doubled)))
    assert pool.cities.equal(cities)
    assert (pool.duplicates, pool.name) == (4, "map.tsp")


def test_gaussian_splits() -> None:
    splits = make_splits(Options())
    assert {name: tuple(part.shape) for name, part in splits.parts.items()} == {
        "train": (6, 4, 2),
        "validation": (2, 4, 2),
        "test": (3, 4, 2),
    }
    assert splits.source == "Gaussian instances of 4 cities, seed 0"
    larger = make_splits(Options(train=60))
    assert larger.parts["train"][:6].equal(splits.parts["train"])
    assert larger.parts["test"].equal(splits.parts["test"])
    assert not as_set(larger.parts["test"]) & as_set(make_splits(Options(seed=1)).parts["test"])


def test_splits_of_a_map(tmp_path: Path) -> None:
    cities = gaussian_instances(1, 80, seed=0)[0].double() * 1000
    path = write_tsplib(tmp_path / "map.tsp", torch.cat([cities, cities[:2]]))
    splits = make_splits(Options(str(path), cities=10))
    assert splits.parts["train"].shape == (6, 10, 2)
    assert len(as_set(torch.cat(list(splits.parts.values())))) == 11
    assert splits.source == "10 cities of the 80 in map.tsp, 2 duplicates dropped, drawn at random, seed 0"
    assert splits.parts["test"].equal(instances_from_pool(cities, 3, 10, seed=0, stream="test"))


def test_splits_of_many_instances(tmp_path: Path) -> None:
    instances = gaussian_instances(20, 5, seed=0)
    path = str(write_many(tmp_path / "many.csv", instances))
    splits = make_splits(Options(path, cities=5))
    assert [len(part) for part in splits.parts.values()] == [6, 2, 3]
    everything = torch.cat(list(splits.parts.values()))
    assert len(as_set(everything)) == 11
    assert as_set(everything) <= as_set(normalise(instances))
    assert splits.source == "20 instances of 5 cities in many.csv, split by seed 0"
    assert make_splits(Options(path, cities=5, train=15)).parts["test"].equal(splits.parts["test"])
    assert not make_splits(Options(path, cities=5, seed=1)).parts["test"].equal(splits.parts["test"])


def test_equal_instances_are_refused(tmp_path: Path) -> None:
    instances = gaussian_instances(20, 5, seed=0)
    instances[7] = instances[3].flip(0)
    with pytest.raises(DataError, match=r"many\.csv, instance '3' and many\.csv, instance '7' are the same instance"):
        make_splits(Options(str(write_many(tmp_path / "many.csv", instances)), cities=5))


def test_too_few_instances_are_split_in_proportion(tmp_path: Path) -> None:
    path = str(write_many(tmp_path / "many.csv", gaussian_instances(20, 5, seed=0)))
    splits = make_splits(Options(path, cities=5, train=2400, validation=240, test=500))
    assert [len(part) for part in splits.parts.values()] == [15, 2, 3]
    assert splits.source == "20 instances of 5 cities in many.csv (3140 were asked for), split by seed 0"


def test_a_map_must_hold_enough_subsets(tmp_path: Path) -> None:
    """So many that n instances are distinct but for a chance of n^2 / (2 x subsets), at most 1/1000."""
    path = write_tsplib(tmp_path / "map.tsp", gaussian_instances(1, 30, seed=0)[0])
    most = math.isqrt(2 * math.comb(30, 6) // 1000)
    options = Options(str(path), cities=6, train=most - 2, validation=1, test=1)
    assert sum(len(part) for part in make_splits(options).parts.values()) == most
    with pytest.raises(DataError, match=f"30 distinct cities, too few to draw {most + 1} distinct instances of 6"):
        make_splits(replace(options, test=2))


@given(n=st.integers(3, 60), counts=st.tuples(*[st.integers(1, 10_000)] * 3))
def test_every_part_gets_its_share(n: int, counts: tuple[int, int, int]) -> None:
    asked = dict(zip(("train", "validation", "test"), counts, strict=True))
    rows = torch.arange(n)
    parts = split_instances(rows, asked, seed=0)  # type: ignore[arg-type]
    assigned = torch.cat(list(parts.values())).tolist()
    assert len(set(assigned)) == len(assigned) == min(n, sum(counts))
    assert all(len(part) >= 1 for part in parts.values())
    if n < sum(counts):
        assert all(abs(len(parts[name]) - n * asked[name] / sum(counts)) < 2 for name in parts)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cities": 3}, "--cities is 3; it must be at least 4"),
        ({"train": 0}, "--train is 0; it must be at least 1"),
        ({"test": -1}, "--test is -1"),
        ({"seed": -1}, "--seed is -1; it must be at least 0"),
        ({"data": "one.tsp", "cities": 12}, r"one\.tsp has one instance of 12 distinct cities, and --cities is 12;"),
        ({"data": "one.tsp", "cities": 50}, r"12 distinct cities, and --cities is 50; give a larger map"),
        ({"data": "one.tsp", "cities": 11}, r"12 distinct cities, too few to draw 11 distinct instances of 11"),
        ({"data": "many.csv", "cities": 4}, r"have 5 cities, and --cities is 4; give --cities 5"),
        ({"data": "two.csv", "cities": 5}, r"two\.csv has 2 instances; at least 3 are needed"),
        ({"data": "absent.tsp"}, r"cannot read .*absent\.tsp"),
    ],
)
def test_splits_that_cannot_be_made(tmp_path: Path, changes: dict[str, int | str], message: str) -> None:
    write_tsplib(tmp_path / "one.tsp", gaussian_instances(1, 12, seed=0)[0])
    write_many(tmp_path / "many.csv", gaussian_instances(9, 5, seed=0))
    write_many(tmp_path / "two.csv", gaussian_instances(2, 5, seed=0))
    if "data" in changes:
        changes = {**changes, "data": str(tmp_path / str(changes["data"]))}
    with pytest.raises(InputError, match=message):
        make_splits(Options(**changes))  # type: ignore[arg-type]
