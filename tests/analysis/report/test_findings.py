"""What the report says first about a run."""

from moe_parallel.analysis.report.findings import findings_of
from moe_parallel.analysis.run_history import RunHistory
from tests.analysis.synthetic import synthetic_run


def found(records, train_iters=None):
    findings = findings_of(RunHistory.from_records(records), train_iters)
    return {finding.kind: finding for finding in findings}


def test_a_healthy_run_has_none():
    assert found(synthetic_run(logged=40), 400) == {}  # its noise is 0.04 nats


def test_losses_that_are_not_finite():
    records = synthetic_run(logged=40)
    records[10]["lm_loss"] = None
    records[20]["lm_loss"] = None
    finding = found(records)["NaN"]
    assert finding.level == "problem"
    assert finding.text == "The training loss is not finite at iteration 110 and 1 more."
    records = synthetic_run(logged=40)
    records[-1]["validation"]["code"]["loss"] = None
    assert found(records)["NaN"].text == "The loss on code is not finite at iteration 400."


def test_dead_experts_are_named_by_layer():
    records = synthetic_run(logged=40, layers=3)
    for record in records[-4:]:
        for expert in (2, 5):
            record["layers"][1]["tokens_per_expert"][expert] = 0
    finding = found(records)["dead experts"]
    assert finding.level == "warning"
    assert finding.text == (
        "2 of 24 experts take less than 1% of an even share at the end of training: layer 2: 2, 5."
    )
    records[-1]["layers"][1]["tokens_per_expert"][2] = 10_000  # not dead at the very end
    assert "layer 2: 5." in found(records)["dead experts"].text


def test_drops_are_a_note_and_from_one_percent_a_warning():
    choices = sum(sum(layer["tokens_per_expert"]) for layer in synthetic_run(1, 1)[0]["layers"])
    few, many = synthetic_run(1, 1, dropped=1), synthetic_run(1, 1, dropped=choices // 50)
    assert found(few)["drops"].level == "note"
    assert found(many)["drops"].level == "warning"
    assert found(many)["drops"].text.startswith("2.00% of all choices were over capacity")


def test_a_busy_expert():
    records = synthetic_run(logged=40, layers=2)
    for record in records[-4:]:
        loads = record["layers"][1]["tokens_per_expert"]
        loads[3] = sum(loads)
    assert found(records)["imbalance"].text.startswith("Expert 3 of layer 2 takes 4.")


def test_loads_on_held_out_text_are_looked_at_too():
    """Of the last evaluation, over all domains: an expert may be for one of them alone."""
    records = synthetic_run(logged=40, layers=2)
    even, only_third = [5956] * 4, [2, 2, 23821, 2]
    domains = {"code": (even, only_third), "prose": ([0, 11912, 5956, 5956], only_third)}
    for name, of_layers in domains.items():
        records[-1]["validation"][name]["layers"] = [
            {"layer": number, "tokens_per_expert": counts}
            for number, counts in enumerate(of_layers, 1)
        ]
    findings = found(records)
    assert set(findings) == {"dead experts", "imbalance"}
    assert findings["dead experts"].text == (
        "3 of 8 experts take less than 1% of an even share on held-out text: layer 2: 0, 1, 3."
    )
    assert findings["imbalance"].text == (
        "Expert 2 of layer 2 takes 4.0 times an even share on held-out text."
    )


def test_ranks():
    records = synthetic_run(logged=40)
    records[-1]["rank_load"] = {"overload": 1.7}
    slow = {"rank": 3, "host": "n7", "cause": "host"}
    for record in records[10:20]:
        record["ranks"] = {"slowest": slow}
    findings = found(records)
    assert "up to 1.7 times" in findings["busy rank"].text
    assert findings["slow rank"].text.startswith("Rank 3 on n7 was clearly slower")
    assert "10 such log lines (25% of all)" in findings["slow rank"].text


def test_a_loss_that_has_risen_and_a_run_that_is_not_complete():
    records = synthetic_run(logged=40)
    records[-1]["validation"]["prose"]["loss"] += 1
    findings = found(records, 1000)
    assert "above its best at iteration 350." in findings["loss has risen"].text
    assert findings["unfinished"].text == "The metrics end at iteration 400 of 1,000."


def test_the_worst_comes_first_and_a_dense_run_has_some():
    records = synthetic_run(logged=20, dropped=1)
    records[3]["lm_loss"] = None
    records[-1]["rank_load"] = {"overload": 3}
    levels = [each.level for each in findings_of(RunHistory.from_records(records), 10**6)]
    assert levels == ["problem", "warning", "note", "note"]
    records = synthetic_run(logged=10, layers=0)
    records[4]["grad_norm"] = None
    assert found(records)["NaN"].text == "The gradient norm is not finite at iteration 50."
