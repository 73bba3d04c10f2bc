"""The division of a host's cores between its ranks, and the kernel's tree that it reads (a tree of files here)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_slide.plan.cores import GpuPlace, Seat, as_list, memory_nodes, share_of

TWO_NODES = {0: [0, 8, 1, 9, 2, 10, 3, 11], 1: [4, 12, 5, 13, 6, 14, 7, 15]}
"""Eight physical cores with two threads each, as `memory_nodes` returns them."""
ALL = frozenset(range(16))


def shares(seats: Sequence[Seat], nodes: Mapping[int, Sequence[int]] = TWO_NODES) -> list[list[int]]:
    return [sorted(share_of(rank, seats, nodes).cores) for rank in range(len(seats))]


def at_nodes(*homes: int | None, cores: frozenset[int] = ALL, **others: bool) -> list[Seat]:
    return [Seat("host", cores, home, **others) for home in homes]


# ---- the tree --------------------------------------------------------------------------------------------------------


def tree(sysfs: Path) -> Path:
    """Two nodes with cores and one without, and four GPUs: two on one switch, one alone, one as in virtual machines."""
    for node, cores in enumerate(("0-3,8-11", "4-7,12-15", "")):
        folder = sysfs / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    for core in range(16):
        folder = sysfs / "devices" / "system" / "cpu" / f"cpu{core}" / "topology"
        folder.mkdir(parents=True)
        (folder / "thread_siblings_list").write_text(f"{core % 8},{core % 8 + 8}\n")
    links = sysfs / "bus" / "pci" / "devices"
    links.mkdir(parents=True)
    for above, gpu, node in (
        ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:00.0", "0000:18:00.0", 0),
        ("pci0000:15/0000:15:01.0/0000:16:00.0/0000:17:01.0", "0000:19:00.0", 0),
        ("pci0000:8a/0000:8a:01.0", "0000:8b:00.0", 1),
        ("pci0000:00", "0000:00:05.0", -1),
    ):
        device = sysfs / "devices" / above / gpu
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
        (links / gpu).symlink_to(device)
    return sysfs


def test_nodes_have_the_threads_of_a_physical_core_side_by_side(tmp_path: Path) -> None:
    assert memory_nodes(tree(tmp_path)) == TWO_NODES
    assert memory_nodes(tmp_path / "nothing") == {}


def test_gpus_below_one_port_share_it(tmp_path: Path) -> None:
    sysfs, port = tree(tmp_path), "0000:15:01.0"
    gpus = ("0000:18:00.0", "0000:19:00.0", "0000:8B:00.0", "0000:00:05.0", "0000:77:00.0")
    found = [GpuPlace.of(bus_id, sysfs) for bus_id in gpus]
    assert found == [GpuPlace(0, port), GpuPlace(0, port), GpuPlace(1, "0000:8a:01.0"), GpuPlace(), GpuPlace()]


def test_this_machine_has_its_cores() -> None:
    known = {core for cores in memory_nodes().values() for core in cores}
    assert not known or known >= os.sched_getaffinity(0)
    assert Seat.of_this_process().cores == os.sched_getaffinity(0)


# ---- the division ----------------------------------------------------------------------------------------------------


def test_a_rank_has_cores_of_its_own_node_and_whole_physical_cores() -> None:
    found = shares(at_nodes(1, 0, 1, 0))
    assert found == [[4, 5, 12, 13], [0, 1, 8, 9], [6, 7, 14, 15], [2, 3, 10, 11]]
    assert [sorted(share_of(rank, at_nodes(1, 0, 1, 0), TWO_NODES).around) for rank in (0, 1)] == [
        sorted(TWO_NODES[1]),
        sorted(TWO_NODES[0]),
    ]


def test_ranks_of_a_node_divide_that_node() -> None:
    # Two of eight threads are left over, so that the ranks of the node have the same.
    assert shares(at_nodes(0, 0, 0, 1)) == [[0, 8], [1, 9], [2, 10], sorted(TWO_NODES[1])]


def test_no_node_lies_idle() -> None:
    """All four GPUs are at node 0. Node 1 has half of the cores and of the memory's bandwidth."""
    assert shares(at_nodes(0, 0, 0, 0)) == [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    # The rank whose GPU is at node 1 has cores there, whatever its number; node 2 has no GPU.
    nodes = {0: [0, 1], 1: [2, 3], 2: [4, 5]}
    assert shares(at_nodes(1, 0, 1, cores=frozenset(range(6))), nodes) == [[2, 3], [0, 1], [4, 5]]


def test_gpus_without_a_known_node_divide_all_cores() -> None:
    assert shares(at_nodes(None, None)) == [sorted(TWO_NODES[0]), sorted(TWO_NODES[1])]
    assert shares(at_nodes(None, None), {}) == [list(range(8)), list(range(8, 16))]


def test_what_the_user_has_chosen_stays() -> None:
    # Cores for each rank, as numactl or --bind_cores_to_rank give them: each keeps its own, whatever its node.
    own = [Seat("host", frozenset(cores), 0) for cores in ((4, 5, 6), (0, 1))]
    assert shares(own) == [[4, 5, 6], [0, 1]]
    assert [share_of(rank, own, TWO_NODES).around for rank in (0, 1)] == [own[0].cores, own[1].cores]
    # Two ranks in each of two containers divide the cores of their own.
    half, other = frozenset(range(4)), frozenset(range(4, 8))
    assert shares([*at_nodes(0, 0, cores=half), *at_nodes(1, 1, cores=other)]) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    # Threads bound by OpenMP's variables: cores are divided as they are numbered.
    assert shares(at_nodes(1, 0, binds=True)) == [list(range(8)), list(range(8, 16))]
    assert share_of(0, at_nodes(1, 0, binds=True), TWO_NODES).around == ALL
    # One rank alone has everything.
    assert share_of(0, at_nodes(1), TWO_NODES).around == ALL and shares(at_nodes(1)) == [sorted(ALL)]


@pytest.mark.parametrize(("value", "binds"), [("close", True), ("false", False), ("", False)])
def test_variables_of_openmp_are_seen(value: str, binds: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_PROC_BIND", value)
    assert Seat.of_this_process().binds == binds


def test_ranks_of_other_hosts_take_no_cores() -> None:
    seats = [Seat("a", ALL, 0), Seat("b", ALL, 0), Seat("a", ALL, 1), Seat("b", ALL, 1)]
    assert shares(seats) == [sorted(TWO_NODES[0])] * 2 + [sorted(TWO_NODES[1])] * 2


@st.composite
def hosts(draw: st.DrawFn) -> tuple[list[Seat], dict[int, list[int]]]:
    """Up to eight ranks that were started with the same cores, on up to four nodes."""
    count = draw(st.integers(1, 4))
    order = draw(st.permutations(range(24)))
    cuts = sorted(draw(st.lists(st.integers(0, 24), min_size=count - 1, max_size=count - 1)))
    nodes = {node: list(order[a:b]) for node, (a, b) in enumerate(zip([0, *cuts], [*cuts, 24], strict=True)) if b > a}
    cores = frozenset(draw(st.sets(st.integers(0, 30), min_size=1)))
    homes = draw(st.lists(st.sampled_from([*nodes, None]), min_size=1, max_size=8))
    return at_nodes(*homes, cores=cores, binds=draw(st.booleans())), nodes


@given(hosts())
def test_any_division_is_fair(host: tuple[list[Seat], dict[int, list[int]]]) -> None:
    seats, nodes = host
    cores, ranks = seats[0].cores, range(len(seats))
    found = [share_of(rank, seats, nodes) for rank in ranks]
    for rank in ranks:
        mine, around = set(found[rank].cores), found[rank].around
        assert mine and mine <= around <= cores and len(mine) == len(found[rank].cores)
        # Ranks that share a core share all of theirs: there were fewer cores than ranks.
        assert all(mine.isdisjoint(found[other].cores) or mine == set(found[other].cores) for other in ranks)
        home = seats[rank].node
        if (
            len(seats) > 1
            and not seats[0].binds
            and {seat.node for seat in seats} == {node for node in nodes if set(nodes[node]) & cores}
            and cores <= set().union(*nodes.values())
        ):
            assert home is not None and mine <= set(nodes[home])
            of_node = [other for other in ranks if seats[other].node == home]
            assert len(mine) == max(len(around) // len(of_node), 1) or len(around) < len(of_node)
    if len({seat.node for seat in seats}) == 1:
        assert len({len(share.cores) for share in found}) == 1
        assert len(cores) - sum(len(share.cores) for share in found) < len(seats)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_cores_are_written_as_the_kernel_does(cores: set[int]) -> None:
    text = as_list([*cores])
    ranges = [part.split("-") for part in text.split(",")]
    assert [core for each in ranges for core in range(int(each[0]), int(each[-1]) + 1)] == sorted(cores)
