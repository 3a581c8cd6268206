"""Storage maps as text, pictures and comparisons: complete, escaped and self-contained."""

import re
import xml.etree.ElementTree as ElementTree
from html.parser import HTMLParser

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torchtether as tt
from torchtether.cli.main import main
from torchtether.pictures.drawing import Scale, clean, cut, width_of
from torchtether.pictures.rows import pattern_of

NASTY = [
    "<script>alert(1)</script>",
    "a\"b&c'd",
    "\x1b[2J\x00\n\t",
    "名前" * 40,
    "x" * 500,
    "\u202eabc",
    "\ud800",
    "]]>",
]


class Layers(nn.Module):
    def __init__(self, count=6, width=8):
        super().__init__()
        self.emb = nn.Embedding(50, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        self.head = nn.Linear(width, 50, bias=False)
        self.head.weight = self.emb.weight


class _Strict(HTMLParser):
    """Collects everything that a page would run or fetch."""

    def __init__(self):
        super().__init__()
        self.found = []

    def handle_starttag(self, tag, attributes):
        names = dict(attributes)
        if tag in ("script", "link", "img", "iframe", "object") or {"src", "href"} & names.keys():
            self.found.append(tag)
        self.found += [name for name in names if name.startswith("on")]


def _check_alone(text):
    parser = _Strict()
    parser.feed(text)
    assert parser.found == []
    assert "url(http" not in text
    assert "@import" not in text
    text.encode()


def _svg_texts(svg):
    root = ElementTree.fromstring(svg)
    return ["".join(node.itertext()) for node in root.iter("{http://www.w3.org/2000/svg}text")]


@pytest.mark.parametrize("make", [Layers, nn.Module, lambda: nn.Linear(1, 1), lambda: nn.LazyLinear(3)])
def test_a_picture_is_well_formed_and_stands_alone(make, tmp_path):
    made = tt.storage_map(make())
    svg, html = made.to_svg(tmp_path / "map.svg"), made.to_html(tmp_path / "map.html")
    assert (tmp_path / "map.svg").read_text() == svg
    assert (tmp_path / "map.html").read_text() == html
    ElementTree.fromstring(svg)
    _check_alone(svg)
    _check_alone(html)
    _check_alone(made.diff(made).to_html())
    assert made._repr_html_()


@pytest.mark.parametrize("name", NASTY, ids=range(len(NASTY)))
def test_names_cannot_break_out(name):
    made = tt.storage_map({name: torch.zeros(3), name + "!": torch.ones(3)})
    for text in (made.to_svg(), made.to_html(), made.diff(tt.storage_map({})).to_html()):
        _check_alone(text)
    ElementTree.fromstring(made.to_svg())
    for line in (*str(made).splitlines(), *str(made.diff(tt.storage_map({}))).splitlines(), repr(made)):
        assert line.isprintable()
    assert all(width_of(line) <= 120 for line in str(made).splitlines())


@given(st.text(), st.integers(0, 30))
def test_text_is_cut_to_its_columns(text, width):
    made = cut(clean(text), width)
    assert width_of(made) <= width
    assert made.isprintable()
    if width_of(clean(text)) <= width:
        assert made == clean(text)


@given(st.lists(st.integers(1, 2**40), min_size=1))
def test_a_scale_keeps_the_order_and_shows_everything(amounts):
    scale = Scale.of(amounts)
    lengths = [scale.length(amount) for amount in sorted(amounts)]
    assert lengths == sorted(lengths)
    assert lengths[-1] == 1
    assert lengths[0] > 0.01
    assert scale.length(0) == 0
    assert 1 <= len(scale.ticks) <= 8 or scale.is_log
    assert all(0 <= scale.length(tick) <= 1 for tick in scale.ticks)


def test_alike_groups_are_one_line_with_their_count():
    text = str(tt.storage_map(Layers(300)))
    assert "layers.*.weight x300" in text
    assert len(text.splitlines()) == 1 + 2 + 2
    assert pattern_of("l.3.w2.10") == "l.*.w2.*"


def test_beyond_the_limit_the_rest_is_counted():
    model = nn.ModuleList(nn.Linear(i + 1, 1, bias=False) for i in range(100))
    made = tt.storage_map(model)
    lines = made.to_text(limit=10).splitlines()
    assert len(lines) == 12
    assert "and 90 names more" in lines[-1]
    assert "99.weight" in "\n".join(lines)  # the largest are shown
    assert "and 90 names more" in made.to_svg(limit=10)
    everything = "\n".join(_svg_texts(made.to_svg(limit=None)))
    assert all(f"{i}.weight" in everything for i in range(100))


def test_many_names_of_one_object_stay_short():
    model = nn.Module()
    model.first = nn.Parameter(torch.zeros(2))
    for i in range(200):
        model.register_parameter(f"name{i}", model.first)
    assert len(str(tt.storage_map(model)).splitlines()) < 40
    assert len(str(tt.storage_map({"a": torch.zeros(4), **{f"v{chr(97 + i)}": torch.zeros(4) for i in range(26)}}))) > 0


def test_ties_are_drawn_as_links():
    svg = tt.storage_map(Layers()).to_svg()
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    dots = [node for node in root.iter(f"{space}circle") if node.get("class") == "tie"]
    assert len(dots) == 2 + 1  # two names, and the key
    assert len({dot.get("cx") for dot in dots[1:]}) == 1
    untied = tt.storage_map(nn.Linear(2, 2)).to_svg()
    assert untied.count('class="tie"') == 1


@pytest.mark.parametrize(("start", "stop"), [(0, 10), (5, 10), (2, 4)])
def test_a_bar_lies_where_its_bytes_do(start, stop):
    whole = torch.zeros(10)
    svg = tt.storage_map({"whole": whole, "cut": whole[start:stop]}).to_svg()
    root = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    frame, first, second = [
        (float(node.get("x")), float(node.get("width")))
        for node in root.iter(f"{space}rect")
        if node.get("class") in ("rest", "tensor")
        and node.get("y")
        and not node.get("opacity")
        and float(node.get("y")) > 90
    ]
    assert frame == first
    assert second[0] == pytest.approx(frame[0] + frame[1] * start / 10, abs=0.02)
    assert second[1] == pytest.approx(frame[1] * (stop - start) / 10, abs=0.02)


# -- what changed -----------------------------------------------------------------------------------------------------


def test_nothing_changed():
    model = Layers()
    diff = tt.storage_map(model).diff(tt.storage_map(model))
    assert not diff
    assert str(diff).splitlines()[1:] == ["nothing has changed (values are not compared)"]


def test_a_quantization_is_told_by_name():
    model = Layers()
    before = tt.storage_map(model)
    tt.quantize(model, {"layers.*.weight": "int8"})
    diff = tt.storage_map(model).diff(before)
    assert {name for name, _ in diff.changes} == {f"layers.{i}.weight" for i in range(6)}
    assert "layers.*.weight x6: plain -> int8; 256 B -> 96 B" in str(diff)


def test_a_stock_load_is_seen_to_break_ties_and_objects():
    with torch.device("meta"):
        stock, ours = Layers(), Layers()
    source = Layers()
    before = tt.storage_map(stock)
    stock.load_state_dict({name: tensor.clone() for name, tensor in source.state_dict().items()}, assign=True)
    changes = dict(tt.storage_map(stock).diff(before).changes)
    assert "another object" in changes["emb.weight"]
    assert "no longer tied to emb.weight" in changes["head.weight"]
    before = tt.storage_map(ours)
    ours.to_empty(device="cpu")
    tt.tie(ours, "emb.weight", "head.weight")
    text = str(tt.storage_map(ours).diff(before))
    assert "meta -> cpu" in text


def test_our_conversion_keeps_objects_and_ties():
    model = Layers()
    before = tt.storage_map(model)
    tt.convert(model, dtype=torch.bfloat16)
    changes = tt.storage_map(model).diff(before).changes
    assert {what.split(";")[0] for _, what in changes} == {"float32 -> bfloat16"}
    assert not any("another object" in what or "tied" in what for _, what in changes)


def test_what_comes_goes_moves_and_is_tied():
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    before = tt.storage_map(model)
    tt.tie(model, "a.weight", "b.weight")
    changes = dict(tt.storage_map(model).diff(before).changes)
    assert "tied to a.weight" in changes["b.weight"]
    before = tt.storage_map(model)
    kept = model["a"].weight.data
    model["a"].weight.data = torch.zeros(3, 3)
    assert "in other memory" in dict(tt.storage_map(model).diff(before).changes)["a.weight"]
    assert kept is not None
    before = tt.storage_map(model)
    del model["b"]
    model["c"] = nn.Linear(1, 1, bias=False)
    assert dict(tt.storage_map(model).diff(before).changes) == {"c.weight": "is new", "b.weight": "is gone"}
    with pytest.raises(TypeError, match="earlier"):
        tt.storage_map(model).diff(3)


# -- the command line -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", ["80", "200"])
def test_the_command_maps_and_compares(tmp_path, capsys, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    model = Layers()
    tt.save(model, tmp_path / "a")
    tt.quantize(model, {"layers.*.weight": "int8"})
    tt.save(model, tmp_path / "b")
    assert main(["map", str(tmp_path / "a"), "--html", str(tmp_path / "a.html"), "--svg", str(tmp_path / "a.svg")]) == 0
    out = capsys.readouterr().out
    assert "layers.*.weight x6" in out
    assert max(map(width_of, out.splitlines()[1:])) <= int(columns)
    assert re.search(r"emb.weight.*\n.*= head.weight", out)
    _check_alone((tmp_path / "a.html").read_text())
    ElementTree.parse(tmp_path / "a.svg")
    against = ["map", str(tmp_path / "b"), "--against", str(tmp_path / "a"), "--html", str(tmp_path / "d.html")]
    assert main(against) == 0
    assert "plain -> int8" in capsys.readouterr().out
    assert "plain -&gt; int8" in (tmp_path / "d.html").read_text()
    assert main(["map", str(tmp_path / "none")]) == 1
    assert main(["map", str(tmp_path / "a"), "--all"]) == 0


def test_what_cannot_be_written_is_one_error(tmp_path):
    with pytest.raises(tt.CheckpointError, match="cannot be written"):
        tt.storage_map(nn.Linear(1, 1)).to_html(tmp_path / "none" / "a.html")


# -- the timeline of a load -------------------------------------------------------------------------------------------


def test_a_load_has_a_timeline(tmp_path):
    tt.save(nn.Linear(1000, 1000), tmp_path / "m.safetensors")
    with torch.device("meta"):
        model = nn.Linear(1000, 1000)
    report = tt.load(model, tmp_path / "m.safetensors")
    assert report.timeline
    moments = [sample.seconds for sample in report.timeline]
    assert moments == sorted(moments)
    assert max(sample.anonymous for sample in report.timeline) == report.peak
    svg = report.to_svg(tmp_path / "load.svg")
    ElementTree.parse(tmp_path / "load.svg")
    _check_alone(svg)
    assert "anonymous memory" in svg
    ElementTree.fromstring(tt.LoadReport().to_svg())


def test_a_long_timeline_stays_short_and_keeps_its_peaks():
    from torchtether.progress import Meter, Resident

    meter = Meter()
    meter._samples, meter._stride, meter._looks = [], 1, 0
    for i in range(20_000):
        meter._note(i / 1000, Resident(10**6 if i == 12_345 else i, 5), Resident(0, 0))
    moments = [sample.seconds for sample in meter.timeline]
    assert 200 < len(moments) <= 601
    assert moments == sorted(moments)
    assert moments[-1] > 19
    (peak,) = [sample for sample in meter.timeline if sample.anonymous == 10**6]
    assert peak.seconds == pytest.approx(12.345, abs=0.1)
