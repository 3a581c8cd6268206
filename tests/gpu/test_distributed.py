"""One rank with the collectives of the device: FSDP2 from meta to a trained model, and DCP of its shards."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import torchtether as tt
from tests.gpu.models import check_same, meta, net, same, step, tensors_of


@pytest.fixture
def mesh(device, tmp_path):
    place = {} if device.type == "cpu" else {"device_id": device}
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(backend, store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1, **place)
    try:
        yield init_device_mesh(device.type, (1,))
    finally:
        dist.destroy_process_group()


def sharded(mesh, folder, **kwargs):
    """A model from meta, over shards."""
    model = meta()
    plan = tt.distributed.plan_units(model, ["up", "down"], mesh=mesh)
    tt.distributed.shard(model, plan)
    tt.distributed.load(model, folder, device=mesh.device_type, **kwargs)
    return model


@pytest.mark.parametrize("scheme", [None, "int8", "nf4"])
def test_from_meta_to_a_trained_model(scheme, mesh, device, tmp_path):
    folder = tmp_path / "model"
    tt.save(net(), folder)
    alone = net(device=device)
    rules = None if scheme is None else {"up.weight": scheme, "down.weight": scheme}
    if rules:
        tt.quantize(alone, rules)
    model = sharded(mesh, folder, quantize=rules)
    for one in (alone, model):
        one.up.weight.requires_grad_(scheme is None)
        one.down.weight.requires_grad_(scheme is None)
    told = []
    for one in (alone, model):
        optimizer = torch.optim.SGD([p for p in one.parameters() if p.requires_grad], lr=0.1)
        told.append([step(one, optimizer, device) for _ in range(3)])
    assert told[0] == pytest.approx(told[1], rel=1e-4)
    tt.distributed.save(model, tmp_path / "saved")
    again = meta()
    tt.load(again, tmp_path / "saved", device=device)
    assert again.head.weight is again.emb.weight
    assert same(again.up.weight.dequantize() if rules else again.up.weight, local(model.up.weight, rules))


def local(tensor, rules):
    whole = tensor.full_tensor().detach()
    return torch.nn.Parameter(whole) if not rules else whole.dequantize()


@pytest.mark.parametrize("scheme", [None, "int8"])
def test_dcp_of_shards_on_the_device(scheme, mesh, device, tmp_path):
    folder = tmp_path / "model"
    source = net()
    if scheme:
        tt.quantize(source, {"up.weight": scheme})
    tt.save(source, folder)
    model = sharded(mesh, folder)
    tt.distributed.save(model, tmp_path / "dcp", format="dcp")
    again = meta()
    tt.load(again, tmp_path / "dcp", device=device)
    check_same(tt.convert(again, device="cpu"), source)
    other = sharded(mesh, tmp_path / "dcp")
    assert tensors_of(other).keys() == tensors_of(model).keys()
    for name, tensor in tensors_of(model).items():
        one, two = (t.to_local() if hasattr(t, "to_local") else t for t in (tensor, tensors_of(other)[name]))
        assert same(one, two), name
