"""diffusers with Weights inside: group offloading, with streams as far as a processor can stand in for a GPU."""

import contextlib

import pytest
import torch
from torch import nn

import torchtether as tt

pytest.importorskip("diffusers")
import diffusers
from diffusers.hooks import apply_group_offloading, group_offloading

pytestmark = [pytest.mark.peers, pytest.mark.filterwarnings("ignore")]  # what diffusers warns about

CPU = torch.device("cpu")
SCHEMES = ["int8", "int4", "nf4", "fp8", tt.Plain()]


class Model(nn.Module):
    """Blocks, what lies beside them, and a head that is tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(3))
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 32)
        self.head.weight = self.emb.weight
        self.register_buffer("shift", torch.ones(64))

    def forward(self, ids):
        hidden = self.emb(ids) + self.shift
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(self.norm(hidden))


@pytest.fixture(params=SCHEMES, ids=str)
def model(request):
    torch.manual_seed(0)
    return tt.quantize(Model().eval().requires_grad_(False), request.param)


IDS = torch.arange(12).view(2, 6)


def facts(model):
    """What offloading must leave as it is: objects, their kinds, and their values."""
    return {
        name: (id(p), type(p), p.spec if isinstance(p, tt.Weight) else p.dtype, p.tolist())
        for name, p in model.named_parameters(remove_duplicate=False)
    }


@pytest.mark.parametrize(
    "how",
    [{"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 1}],
    ids=["leaf", "block"],
)
@pytest.mark.parametrize("non_blocking", [True, False])
@torch.no_grad()
def test_without_streams(model, how, non_blocking):
    expected, before = model(IDS), facts(model)
    apply_group_offloading(model, CPU, CPU, non_blocking=non_blocking, **how)
    for _ in range(2):
        assert torch.equal(model(IDS), expected)
        assert facts(model) == before


class Stream(torch.cpu.Stream):
    def synchronize(self):
        pass


@pytest.fixture
def accelerator(monkeypatch):
    """A processor that answers as an accelerator does: it pins by copying, and notes the memory that a stream uses."""
    recorded, library = set(), torch.library.Library("aten", "IMPL")
    with contextlib.ExitStack() as stack:
        stack.callback(library._destroy)
        library.impl("record_stream", lambda tensor, stream: recorded.add(tensor.data_ptr()), "CPU")
        monkeypatch.setattr(torch.Tensor, "pin_memory", torch.Tensor.clone)
        monkeypatch.setattr(torch.cpu, "current_stream", lambda: torch.Stream(device="cpu"))
        yield recorded


@pytest.mark.parametrize("low_memory", [True, False])
@pytest.mark.parametrize("record", [True, False])
@pytest.mark.parametrize("kind", ["leaf_level", "block_level"])
@torch.no_grad()
def test_with_streams(model, accelerator, kind, record, low_memory):
    expected, before = model(IDS), facts(model)
    config = group_offloading.GroupOffloadingConfig(
        onload_device=CPU, offload_device=CPU, offload_type=group_offloading.GroupOffloadingType(kind),
        non_blocking=True, record_stream=record, low_cpu_mem_usage=low_memory, num_blocks_per_group=1, stream=Stream(),
    )  # fmt: skip
    group_offloading._apply_group_offloading(model, config)
    for _ in range(3):
        assert torch.equal(model(IDS), expected)
        assert facts(model) == before
    assert bool(accelerator) == record


def test_offloading_to_the_disk_refuses_in_one_line_and_changes_no_tensor(model, tmp_path):
    before = facts(model)
    with pytest.raises(RuntimeError, match=r"tt\.save") as caught:
        apply_group_offloading(model, CPU, CPU, offload_type="leaf_level", offload_to_disk_path=str(tmp_path))
    assert "\n" not in str(caught.value)
    assert facts(model) == before


CHANGES = {
    "load": lambda model, path: tt.load(model, path),
    "convert": lambda model, path: tt.convert(model, dtype=torch.bfloat16),
    "quantize": lambda model, path: tt.quantize(model, "int8"),
    "refit": lambda model, path: tt.refit(model, path),
}


def offload(model, folder):
    """Offload each layer of ``model`` to a file in ``folder``; with ``None`` to pinned memory, with a stream."""
    config = group_offloading.GroupOffloadingConfig(
        onload_device=CPU, offload_device=CPU, offload_type=group_offloading.GroupOffloadingType("leaf_level"),
        non_blocking=False, record_stream=False, low_cpu_mem_usage=True, stream=None if folder else Stream(),
        offload_to_disk_path=folder and str(folder),
    )  # fmt: skip
    group_offloading._apply_group_offloading(model, config)


@pytest.mark.parametrize(("verb", "to_disk"), [("quantize", False), *((verb, True) for verb in CHANGES)])
@torch.no_grad()
def test_a_change_under_groups_that_keep_the_old_values_is_refused(accelerator, verb, to_disk, tmp_path):
    """Groups on a disk read their files at every forward, and those with a stream copy from pinned memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).requires_grad_(False)
    tt.save(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), tmp_path / "other")
    inputs = torch.ones(1, 8)
    expected = model(inputs)
    offload(model, tmp_path / "groups" if to_disk else None)
    if to_disk:  # between forwards the memory holds anything
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    with pytest.raises(tt.ConversionError, match=rf"cannot {verb} under diffusers' group offloading.*old values"):
        CHANGES[verb](model, tmp_path / "other")
    if to_disk:
        with pytest.raises(tt.CheckpointError, match="keeps its values in files"):
            tt.save(model, tmp_path / "new")
        with pytest.raises(tt.ArgumentError, match="keeps its values in files"):
            tt.plan_quantize(model, bits=8)
        assert not (tmp_path / "new").exists()
    assert torch.equal(model(inputs), expected)


@torch.no_grad()
def test_a_load_into_memory_that_groups_with_a_stream_copy_stays(accelerator, tmp_path):
    model, other = nn.Sequential(nn.Linear(8, 8)).requires_grad_(False), nn.Sequential(nn.Linear(8, 8))
    tt.save(other, tmp_path)
    offload(model, None)
    tt.load(model, tmp_path)
    assert torch.equal(model(torch.ones(1, 8)), other(torch.ones(1, 8)))


@torch.no_grad()
def test_a_change_under_groups_without_streams_stays(tmp_path):
    model, twin = (Model().eval().requires_grad_(False) for _ in range(2))
    tt.save(Model(), tmp_path)
    apply_group_offloading(model, CPU, CPU, offload_type="leaf_level")
    for change in CHANGES.values():
        change(model, tmp_path), change(twin, tmp_path)
        assert torch.equal(model(IDS), twin(IDS))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_a_load_keeps_in_float32_what_from_pretrained_does(tmp_path, dtype):
    config = dict(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=1, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    torch.manual_seed(0)
    diffusers.WanTransformer3DModel(**config).save_pretrained(tmp_path)
    reference = diffusers.WanTransformer3DModel.from_pretrained(tmp_path, torch_dtype=dtype).state_dict()
    assert torch.float32 in {tensor.dtype for tensor in reference.values()}
    with tt.on_meta():
        model = diffusers.WanTransformer3DModel(**config)
    tt.load(model, tmp_path, dtype=dtype)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == reference[name].dtype, name
        assert torch.equal(tensor, reference[name]), name
