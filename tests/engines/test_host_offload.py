"""Tensors in host memory and back: tensors that share memory still share it afterwards."""

from __future__ import annotations

import torch

from flexrlhf.engines.host_offload import HostOffload, storage_bytes


def test_memory_is_counted_once_however_many_tensors_lie_in_it() -> None:
    whole = torch.zeros(10)
    assert storage_bytes([whole, whole[2:5], whole.view(2, 5)]) == 40
    assert storage_bytes([whole, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(0)]) == 46
    assert storage_bytes([]) == 0


def test_views_come_back_over_the_same_memory() -> None:
    whole = torch.arange(10.0)
    part, other = whole[2:5], torch.ones(3, dtype=torch.float16)
    host_offload = HostOffload(torch.device("cpu"))
    host_offload.offload([part, whole, other])
    assert host_offload.num_bytes == 46
    assert whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    host_offload.reload()
    assert host_offload.num_bytes == 0
    assert whole.tolist() == list(range(10)) and other.tolist() == [1, 1, 1]
    part.fill_(7)
    assert whole[2:5].tolist() == [7, 7, 7]


def test_host_memory_is_kept_for_the_next_time() -> None:
    values, host_offload = torch.arange(10.0), HostOffload(torch.device("cpu"))
    places = set()
    for number in (1.0, 2.0):
        values.fill_(number)
        host_offload.offload([values])
        places.add(host_offload.readable(values).data_ptr())
        assert host_offload.readable(values).tolist() == [number] * 10
        host_offload.reload()
        assert values.tolist() == [number] * 10
    assert len(places) == 1


def test_unchanged_tensors_are_not_copied_again() -> None:
    values, host_offload = torch.arange(3.0), HostOffload(torch.device("cpu"))
    host_offload.offload([values])
    host_offload.reload()
    values.fill_(7)
    later = torch.ones(3)
    # the first has a copy, the second none
    host_offload.offload([values, later], changed=False)
    assert host_offload.num_bytes == 24 and host_offload.readable(values).tolist() == [0, 1, 2]
    host_offload.reload()
    assert values.tolist() == [0, 1, 2] and later.tolist() == [1, 1, 1]
    values.fill_(8)
    host_offload.offload([values, later])
    host_offload.reload()
    assert values.tolist() == [8, 8, 8]
    # without a copy of them there is nothing to come back
    host_offload.offload([values, later], keeps=False)
    host_offload.reload()
    values.fill_(9)
    host_offload.offload([values], changed=False)
    host_offload.reload()
    assert values.tolist() == [9, 9, 9]


def test_released_storages_are_freed_and_allocated_again_for_all_sharers() -> None:
    whole, other = torch.arange(10.0), torch.ones(3, dtype=torch.float16)
    part, host_offload = whole[2:5], HostOffload(torch.device("cpu"))
    host_offload.offload([part, whole, other, torch.zeros(0)], keeps=False)
    assert host_offload.num_bytes == whole.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
    host_offload.reload()
    assert whole.untyped_storage().nbytes() == 40 and other.untyped_storage().nbytes() == 6
    whole.fill_(7.0)
    assert part.tolist() == [7.0, 7.0, 7.0]


def test_lent_tensors_go_to_host_memory_when_they_come_back() -> None:
    kept, lent, host_offload = torch.ones(4), torch.arange(3.0), HostOffload(torch.device("cpu"))
    host_offload.lend([lent])
    lent.untyped_storage().resize_(0)
    host_offload.offload([kept, lent])
    assert host_offload.num_bytes == 16
    lent.untyped_storage().resize_(12)
    lent.copy_(torch.arange(3.0))
    host_offload.take_back([lent])
    assert host_offload.num_bytes == 28 and lent.untyped_storage().nbytes() == 0
    host_offload.reload()
    assert lent.tolist() == [0, 1, 2] and kept.tolist() == [1] * 4


def test_a_module_computes_with_refilled_weights() -> None:
    layer, host_offload = torch.nn.Linear(4, 4), HostOffload(torch.device("cpu"))
    stored = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    inputs = torch.ones(1, 4)
    before = layer(inputs)
    host_offload.offload([parameter.detach() for parameter in layer.parameters()], keeps=False)
    assert all(parameter.untyped_storage().nbytes() == 0 for parameter in layer.parameters())
    host_offload.reload()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(stored[name])
    assert torch.equal(layer(inputs), before)


def test_nothing_may_be_offloaded() -> None:
    host_offload = HostOffload(torch.device("cpu"))
    host_offload.offload([torch.zeros(0)])
    host_offload.reload()
    host_offload.offload([])
    assert host_offload.num_bytes == 0
