import pytest

from moe_parallel.data.preprocess.records import Bad, Columns, Lines, PlainText, Record, Rows

TEXT = Columns(("text",))
CONVERT = "convert it, as iconv -f latin1 -t utf-8 does"


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON (Expecting ',' delimiter, column 13)"),
        (b"[1]", "not a JSON object: expected one {...} per line"),
        (b'{"body": "a", "id": 1}', "no key 'text' (its keys: 'body', 'id'): see --json-keys"),
        (b"{}", "no key 'text' (its keys: none): see --json-keys"),
        (b'{"text": 7}', "int, not text, under 'text'"),
        (b'{"text": null}', "NoneType, not text, under 'text'"),
        (b'{"text": "\xff"}', f"not UTF-8 (byte 11): {CONVERT}"),
        ('{"text": "a"}'.encode("utf-16"), f"not UTF-8 (byte 1): {CONVERT}"),
        (b'{"text": ' + b"[" * 100_000, "nested too deeply"),
        (b'{"text": ' + b"9" * 5_000 + b"}", "a number with too many digits"),
    ],
)
def test_a_bad_line_has_its_number_and_a_reason(line: bytes, reason: str) -> None:
    batch = Lines(7, "d", b'{"text": "fine"}\n' + line.replace(b"\n", b" ") + b"\n{}")
    good, bad, _ = batch.records(TEXT)
    assert good == Record(7, ["fine"], "d")
    assert bad == Bad(8, reason)


def test_the_keys_of_a_stranger_do_not_fill_the_screen() -> None:
    line = b"{" + b", ".join(b'"%s%d": 1' % (b"k" * 10_000, i) for i in range(100)) + b"}"
    (bad,) = Lines(1, "d", line).records(TEXT)
    assert isinstance(bad, Bad) and len(bad.reason) < 600 and "..." in bad.reason


def test_texts_come_in_the_order_of_the_keys() -> None:
    columns = Columns(("title", "text"), domain="source")
    line = b'{"text": "b", "source": "web", "title": "a"}'
    assert list(Lines(1, "d", line).records(columns)) == [Record(1, ["a", "b"], "web")]
    rows = Rows(3, "d", [[b"a", b"\xff"], [b"b", b"b"], [b"web", None]])
    assert list(rows.records(columns)) == [
        Record(3, ["a", "b"], "web"),
        Bad(4, f"not UTF-8 under 'title' (byte 1): {CONVERT}"),
    ]


def test_a_domain_is_a_text() -> None:
    columns = Columns(("text",), domain="source")
    bad = list(Lines(1, "d", b'{"text": "a"}\n{"text": "a", "source": 3}').records(columns))
    assert bad == [
        Bad(1, "no key 'source' (its keys: 'text'): see --json-keys"),
        Bad(2, "int, not text, under 'source'"),
    ]
    assert list(Rows(1, "d", [[b"a"], [None]]).records(columns)) == [
        Bad(1, "no text under 'source' (null)")
    ]


def test_keys_of_inner_objects() -> None:
    line = b'{"meta": {"of": {"web": "a"}, "n": 1}, "meta.n": "b", "text": "c"}'
    columns = Columns(("meta.of.web", "meta.n", "text"))
    assert list(Lines(1, "d", line).records(columns)) == [Record(1, ["a", "b", "c"], "d")]
    for key in ("meta.off", "text.a", "meta.of.web.a"):
        (bad,) = Lines(1, "d", line).records(Columns((key,)))
        keys = "'meta', 'meta.n', 'text'"
        assert bad == Bad(1, f"no key {key!r} (its keys: {keys}): see --json-keys")


def test_plain_text_is_one_document_under_any_key() -> None:
    columns = Columns(("body",), domain="source")
    assert list(PlainText("d", b"a\r\nb\n").records(columns)) == [Record(1, ["a\r\nb\n"], "d")]
    assert list(PlainText("d", b"ab\xff").records(columns)) == [
        Bad(1, f"not UTF-8 (byte 3): {CONVERT}")
    ]
