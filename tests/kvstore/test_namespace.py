from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import InvalidArgument
from kvstore.hashing import block_hashes
from kvstore.layout import DType, LatentLayout, Strip
from kvstore.namespace import Namespace
from tests.kvstore.blocks import SMALL, hit, load_chain, open_store, store_chain, tokens

TEXT = st.text(max_size=20)
LAYOUTS = st.builds(
    LatentLayout,
    num_layers=st.integers(1, 4),
    latent_rank=st.sampled_from([32, 128]),
    rope_dim=st.sampled_from([0, 16]),
    dtype=st.sampled_from([DType.BF16, DType.FP16, DType.FP8]),
    first_layer=st.integers(0, 3),
    strips=st.sampled_from([(), (Strip("indexer", 2),), (Strip("indexer", 4),), (Strip("other", 2),)]),
    block_tokens=st.sampled_from([16, 64]),
)
BY_FIELD = {field.name: TEXT for field in fields(Namespace)} | {
    "layout": LAYOUTS,
    "rope_layout": st.sampled_from(["interleaved", "halves"]),
}
NAMESPACES = st.builds(Namespace, **BY_FIELD)
SECRET = b"secret"


@given(NAMESPACES)
def test_a_namespace_survives_json_with_its_digest(namespace):
    again = Namespace.from_json(namespace.to_json())
    assert again == namespace
    assert again.digest(SECRET) == namespace.digest(SECRET)


@given(NAMESPACES, st.sampled_from(sorted(BY_FIELD)), st.data())
def test_namespaces_that_differ_in_any_one_field_share_no_hash(namespace, field, data):
    other = replace(
        namespace, **{field: data.draw(BY_FIELD[field].filter(lambda v: v != getattr(namespace, field)))}
    )
    ours, theirs = namespace.digest(SECRET), other.digest(SECRET)
    assert ours != theirs
    ids = list(range(128))
    assert not set(block_hashes(ours, ids)) & set(block_hashes(theirs, ids))


@given(NAMESPACES, TEXT, TEXT)
def test_text_cannot_move_from_one_field_into_the_next(namespace, one, two):
    """No choice of text makes two different namespaces look alike, separators and quotes included."""
    left, right = replace(namespace, model=one, revision=two), replace(namespace, model=two, revision=one)
    assert (left.digest(SECRET) == right.digest(SECRET)) == (one == two)


def test_tenants_with_other_secrets_share_nothing():
    namespace = Namespace(layout=SMALL)
    assert namespace.digest(b"a") != namespace.digest(b"b")


ONE_FIELD_OTHER = [
    {"model": "m"},
    {"revision": "r"},
    {"tenant": "t"},
    {"rope": "{}"},
    {"rope_layout": "interleaved"},
    {"adapter": "lora"},
    {"salt": "s"},
    {"numerics": "C=512"},
    *(
        {"layout": replace(SMALL, **change)}
        for change in (
            {"num_layers": 3},
            {"latent_rank": 48},
            {"rope_dim": 32},
            {"dtype": DType.FP16},
            {"first_layer": 1},
            {"strips": (Strip("indexer", 2),)},
            {"block_tokens": 32},
        )
    ),
]


def test_every_field_is_among_those_tried():
    assert {name for change in ONE_FIELD_OTHER for name in change} == {f.name for f in fields(Namespace)}
    tried = {
        f.name
        for c in ONE_FIELD_OTHER
        for f in fields(SMALL)
        if getattr(c.get("layout", SMALL), f.name) != getattr(SMALL, f.name)
    }
    assert tried == {f.name for f in fields(LatentLayout)}


@pytest.mark.parametrize("change", ONE_FIELD_OTHER, ids=lambda c: str(next(iter(c.items())))[:60])
def test_a_store_never_hits_across_namespaces(tmp_path, change):
    prompt = tokens(1, 4)
    with open_store(tmp_path) as store:
        ours = store.open_namespace(Namespace(layout=SMALL))
        store_chain(store, ours, block_hashes(ours, prompt))
        theirs = store.open_namespace(replace(Namespace(layout=SMALL), **change))
        assert hit(store, ours, prompt) == 192
        hashes = block_hashes(theirs, prompt)
        assert store.match(theirs, hashes, len(hashes) * 64).stored_blocks == 0
        # Not even by hashes that were stolen.
        stolen = block_hashes(ours, prompt)
        assert store.match(theirs, stolen, 512).stored_blocks == 0
        assert load_chain(store, theirs, stolen) == 0


@pytest.mark.parametrize(
    "text", ["", "[]", "null", "{}", '{"layout": {}}', '{"layout": {"num_layers": 1}, "x": ""}']
)
def test_malformed_json_is_refused(text):
    with pytest.raises(InvalidArgument, match="not a namespace"):
        Namespace.from_json(text)


@pytest.mark.parametrize("fields_", [{"model": 1}, {"salt": "x" * 4097}, {"rope_layout": "thirds"}])
def test_bad_fields_are_refused_by_name(fields_):
    with pytest.raises(InvalidArgument, match=next(iter(fields_))):
        Namespace(layout=SMALL, **fields_)
