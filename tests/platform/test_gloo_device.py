"""All gloo groups of a process share the device of the default group."""

import psutil
import torch
from torch import distributed as dist

from moe_parallel.config import make_config
from moe_parallel.parallel import destroy_groups, initialize_groups
from moe_parallel.platform.cpu_host import adapt_megatron_to_cpu
from tests.distributed import run_distributed


def count_devices() -> int:
    """A device accepts the connections of its groups' peers. (The ranks' store is in another
    process.)"""
    connections = psutil.Process().net_connections(kind="tcp")
    return sum(each.status == psutil.CONN_LISTEN for each in connections)


def sum_of_ranks(group: dist.ProcessGroup) -> float:
    ranks = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(ranks, group=group)
    return ranks.item()


def _groups_of_megatron() -> tuple[list[int], list[float]]:
    adapt_megatron_to_cpu()
    devices = [count_devices()]
    groups = initialize_groups(make_config({"tensor_model_parallel_size": 2}).parallel)
    devices.append(count_devices())
    sums = [sum_of_ranks(group) for group in (groups.tp, groups.dp, groups.tp_dp_cp)]
    del groups
    destroy_groups()
    devices.append(count_devices())
    sums.append(sum_of_ranks(dist.group.WORLD))
    return devices, sums


def test_megatron_makes_no_further_device():
    (devices_0, sums_0), (devices_1, sums_1) = run_distributed(2, _groups_of_megatron)
    assert devices_0 == devices_1 == [1, 1, 1]
    assert sums_0 == [1, 0, 1, 1]
    assert sums_1 == [1, 1, 1, 1]
