"""Real models built on meta: every buffer comes back exactly, ties hold, and a checkpoint without them is enough."""

import copy
import warnings
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import torchtether as tt
from tests.ties.test_transformers import MODELS
from torchtether.conversion import materializing
from torchtether.ties.names import named_tensors

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.peers


@pytest.mark.parametrize("name", MODELS)
def test_materialized_is_eager(name):
    config, fields, _ = MODELS[name]
    made = getattr(transformers, config)(**fields)

    def build():
        with warnings.catch_warnings(action="ignore"):
            return getattr(transformers, name)(made).eval()

    eager = build()
    with tt.on_meta():
        model = build()
    assert all(tensor.is_meta for tensor in named_tensors(model).values())
    ties, ids = tt.find_ties(model), {n: id(t) for n, t in named_tensors(model).items()}
    tt.materialize(model)
    assert tt.find_ties(model) == ties == tt.find_ties(eager)
    assert {n: id(t) for n, t in named_tensors(model).items()} == ids
    for key, buffer in eager.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    for key, parameter in eager.named_parameters():
        spread = model.get_parameter(key).std(correction=0) / parameter.std(correction=0).clamp_min(1e-9)
        assert parameter.numel() < 100 or 0.5 < spread < 2 or not parameter.any(), key
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            parameter.copy_(eager.get_parameter(key))
        tokens = {"input_ids": torch.arange(1, 9)[None]}
        if model.config.is_encoder_decoder:
            tokens["decoder_input_ids"] = tokens["input_ids"]
        assert torch.equal(model(**tokens).logits, eager(**tokens).logits)


MARKS = {"_is_hf_initialized", "_tether_initialised"}


def _vit():
    return transformers.ViTModel(transformers.ViTConfig(hidden_size=48, num_hidden_layers=2, num_attention_heads=4))


def test_same_numbers_as_the_constructor():
    """In a ViT no tensor is dropped; its positions and weights are set by ``_init_weights`` alone."""
    torch.manual_seed(3)
    eager = _vit()
    with tt.on_meta():
        model = _vit()
    torch.manual_seed(3)
    tt.materialize(model)
    assert all(torch.equal(model.get_parameter(n), one) for n, one in eager.named_parameters())


def test_changes_after_the_constructor_stay():
    with tt.on_meta():
        model = _vit()
        torch.nn.init.ones_(model.pooler.dense.weight)
    tt.materialize(model)
    assert model.pooler.dense.weight.eq(1).all()
    assert not model.pooler.dense.bias.any()


def test_a_model_on_a_real_device_is_left_to_transformers():
    torch.manual_seed(3)
    eager = _vit()
    torch.manual_seed(3)
    with tt.on_meta(), torch.device("cpu"):
        model = _vit()
    assert all(torch.equal(model.get_parameter(n), one) for n, one in eager.named_parameters())


def test_init_weights_works_after_the_block():
    with tt.on_meta():
        model = _vit()
    assert not any(vars(module).keys() & MARKS for module in model.modules())
    for tensor in model.to_empty(device="cpu").parameters():
        torch.nn.init.constant_(tensor, 5)
    model.init_weights()
    assert not any(tensor.eq(5).all() for tensor in model.parameters())


def test_a_copy_made_in_a_constructor_is_initialised_as_its_original():
    with tt.on_meta():
        around = _Around(_Pair(_vit()))
    tt.materialize(around)
    one, other = around.inner.one, around.inner.other
    assert all(torch.equal(other.get_parameter(name), tensor) for name, tensor in one.named_parameters())


def test_from_pretrained_inside_the_block_initialises_what_no_file_has(tmp_path):
    """It builds its model on ``meta``, too, and fills the memory of what is missing afterwards."""
    fields = {"vocab_size": 9, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**fields, num_attention_heads=2, num_labels=3)
    stock = transformers.LlamaModel(config)
    stock.save_pretrained(tmp_path)
    torch.use_deterministic_algorithms(True)  # new memory is filled with nan
    try:
        with tt.on_meta(), torch.device("cpu"):
            model = transformers.LlamaForSequenceClassification.from_pretrained(tmp_path, num_labels=3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(model.model.rotary_emb.inv_freq, stock.rotary_emb.inv_freq)
    assert 0.005 < model.score.weight.std() < 0.05


class _Around(transformers.PreTrainedModel):
    """A model around another one, which may have its values already."""

    config_class = transformers.ViTConfig
    _supports_sdpa = True

    def __init__(self, inner):
        super().__init__(inner.config)
        self.inner, self.head = inner, torch.nn.Linear(4, 4)
        self.post_init()

    def _init_weights(self, module):
        if isinstance(module, torch.nn.Linear):
            torch.nn.init.constant_(module.weight, 7)


class _Pair(torch.nn.Module):
    def __init__(self, one):
        super().__init__()
        self.config, self.one, self.other = one.config, one, copy.deepcopy(one)


def _loaded(context, path):
    with context:
        model = _vit()
    tt.load(model, path)
    return model


@pytest.mark.parametrize("how", ["materialize", "load", "load into plain meta", "apply in parts"])
def test_a_model_around_a_filled_one_keeps_its_values(how, tmp_path):
    tt.save(_vit(), tmp_path)
    if how == "materialize":
        with tt.on_meta():
            model = _vit()
        tt.materialize(model)
    elif how == "apply in parts":
        with tt.on_meta():
            model = _vit()
        plan = tt.plan_load(model, tmp_path)
        plan.apply(only="pooler.*")
        plan.apply()
    else:
        model = _loaded(tt.on_meta() if how == "load" else torch.device("meta"), tmp_path)
    before = {name: tensor.clone() for name, tensor in model.named_parameters()}
    around = _Around(model)
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in before.items())
    assert around.head.weight.eq(7).all()


def test_missing_tensors_are_not_marked_as_initialised(tmp_path):
    """``from_pretrained`` initialises them, and ``init_weights`` does so after a load that is not strict."""
    state = {name: tensor for name, tensor in _vit().state_dict().items() if not name.startswith("pooler")}
    torch.save(state, tmp_path / "model.pt")
    with torch.device("meta"):
        model = _vit()
    for tensor in model.to_empty(device="cpu").parameters():
        torch.nn.init.constant_(tensor, 5)
    tt.load(model, tmp_path / "model.pt", strict=False)
    model.init_weights()
    assert not model.pooler.dense.weight.eq(5).any()
    assert all(torch.equal(model.get_parameter(name), tensor) for name, tensor in state.items())


def test_materialize_marks_only_what_it_fills():
    with torch.device("meta"):
        model = _vit()
    for tensor in model.to_empty(device="cpu").parameters():
        torch.nn.init.constant_(tensor, 5)
    with tt.on_meta():
        model.pooler.dense.bias = torch.nn.Parameter(torch.zeros(48))
    tt.materialize(model)
    model.init_weights()
    assert model.pooler.dense.weight.eq(5).all()
    assert not model.layernorm.weight.eq(5).any()


def test_a_model_with_values_keeps_its_marks_inside_the_block():
    inner = _vit()
    with tt.on_meta():
        _Around(inner)
    before = inner.pooler.dense.weight.clone()
    assert torch.equal(_Around(inner).inner.pooler.dense.weight, before)


def test_models_on_plain_meta_are_left_alone():
    """Also of another thread, and after the first ``tt.on_meta()``."""
    with tt.on_meta():
        _vit()
        with ThreadPoolExecutor() as pool:
            other = pool.submit(_on_plain_meta).result()
        assert not vars(other.pooler).keys() & MARKS
    assert not vars(_on_plain_meta().pooler).keys() & MARKS


def test_modules_with_tensors_on_meta_are_not_marked():
    """As after ``tt.distributed.load``, which leaves recorded tensors to ``tt.materialize``."""
    model = _on_plain_meta()
    model.pooler.dense.to_empty(device="cpu")
    materializing.tell_filled(model, ())
    with_tensors = [m for m in model.modules() if [*m.parameters(recurse=False), *m.buffers(recurse=False)]]
    assert [m for m in with_tensors if vars(m).keys() & MARKS] == [model.pooler.dense]


def _on_plain_meta():
    with torch.device("meta"):
        return _vit()


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration"])
def test_quantized_without_untying(name):
    config, fields, _ = MODELS[name]
    with warnings.catch_warnings(action="ignore"):
        model = getattr(transformers, name)(getattr(transformers, config)(**fields)).eval()
    ties = [tie.names for tie in tt.find_ties(model)]
    tt.quantize(model, "int8")
    assert [tie.names for tie in tt.find_ties(model)] == ties
    tt.check_ties(model)
    tokens = {"input_ids": torch.arange(1, 9)[None]}
    if model.config.is_encoder_decoder:
        tokens["decoder_input_ids"] = tokens["input_ids"]
    with torch.no_grad():
        quantized = model(**tokens).logits
        assert torch.allclose(quantized, tt.dequantize(model)(**tokens).logits, atol=1e-4)
