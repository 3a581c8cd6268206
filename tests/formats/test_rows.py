"""Rows of published weights that are read alone equal those of the whole, and only their bytes are read."""

import json
import random
from types import SimpleNamespace

import pytest
import torch

import torchtether as tt
from tests.formats.test_golden import SAMPLES, _file
from torchtether.errors import UnsupportedOpError
from torchtether.files import TensorFile
from torchtether.formats import awq, gptq
from torchtether.schemes import part_rows

WHOLE = ("quanto_qint2", "quanto_qint4", "hqq", "sinq")


def _bits(part):
    return torch.empty(part.shape, dtype=part.dtype).copy_(part).reshape(-1).view(torch.uint8) if part.numel() else part


@pytest.mark.parametrize("sample", SAMPLES)
def test_rows_are_those_of_the_whole(sample):
    draw = random.Random(sample)
    with tt.open(_file(sample)) as checkpoint:
        for name, entry in checkpoint.entries.items():
            if entry.spec is None:
                continue
            base, whole = entry.spec.base, checkpoint.read(name)
            layout, count = entry.spec.scheme.layout(base), 0
            middle = base[0] // 2
            for start, stop in [(0, middle), (middle, base[0]), (0, 0), (base[0], base[0]), *_ranges(draw, base[0])]:
                try:
                    cuts = part_rows(layout, base, start, stop)
                except UnsupportedOpError:
                    continue
                given = checkpoint.read_rows(name, base, start, stop)
                for role, cut in cuts.items():
                    wanted = whole.parts[role] if cut is None else whole.parts[role][cut]
                    assert given[role].shape == wanted.shape
                    assert torch.equal(_bits(given[role]), _bits(wanted)), (name, role, start, stop)
                count += 1
                nbytes = checkpoint.rows_nbytes(name, base, start, stop)
                if nbytes is not None and (start, stop) == (0, middle) and base[0] > 64:
                    assert (nbytes == checkpoint.nbytes(name)) == sample.startswith(WHOLE), (name, nbytes)
            assert count


def _ranges(draw, rows):
    for _ in range(4):
        start = draw.randrange(rows)
        yield start, draw.randrange(start, rows + 1)


@pytest.mark.parametrize("format", ["gptq", "awq"])
def test_columns_are_read_without_what_lies_between(tmp_path, format, monkeypatch):
    """Codes of one output lie along a column: of each row of words that piece is read which the rank needs."""
    rows, columns = {"gptq": 16384, "awq": 65536}[format], 32
    words = {"gptq": (columns // 8, rows), "awq": (columns, rows // 8)}[format]
    draw = torch.Generator().manual_seed(0)
    tensors = {
        "m.qweight": torch.randint(-(2**31), 2**31, words, dtype=torch.int64, generator=draw).to(torch.int32),
        "m.qzeros": torch.randint(-(2**31), 2**31, (1, rows // 8), dtype=torch.int64, generator=draw).to(torch.int32),
        "m.scales": torch.rand(1, rows, generator=draw).to(torch.float16),
    }
    tt.save(tensors, tmp_path)
    said = {"quant_method": format, "bits": 4, "group_size": -1, "version": "gemm", "zero_point": True}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": said}))
    read, stock = SimpleNamespace(nbytes=0), TensorFile.read_bytes

    def count(self, buffers, at):
        read.nbytes += sum(len(memory) for _, memory in buffers)
        return stock(self, buffers, at)

    with tt.open(tmp_path) as checkpoint:
        assert checkpoint.format == (gptq if format == "gptq" else awq).name
        whole = checkpoint["m.weight"]
        monkeypatch.setattr(TensorFile, "read_bytes", count)
        given = checkpoint.read_rows("m.weight", (rows, columns), rows // 4, rows // 2)
        assert read.nbytes == checkpoint.rows_nbytes("m.weight", (rows, columns), rows // 4, rows // 2)
        zeros = tensors["m.qzeros"].nbytes if format == "gptq" else tensors["m.qzeros"].nbytes // 4
        assert read.nbytes == tensors["m.qweight"].nbytes // 4 + tensors["m.scales"].nbytes // 4 + zeros
    for role, part in given.items():
        assert torch.equal(_bits(part), _bits(whole.parts[role][rows // 4 : rows // 2]))
