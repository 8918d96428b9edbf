"""docs/licences.md is what is installed."""

from benchmarks import licences


def test_the_list_is_right():
    assert licences.problems(licences.read_list()) == []
    assert {"torch", "numpy", "safetensors"} <= set(licences.needed())


def test_another_licence_is_noticed(monkeypatch):
    listed = licences.read_list()
    (problem,) = licences.problems({**listed, "numpy": "MIT"})
    assert f"'{listed['numpy']}', the list has 'MIT'" in problem
    del listed["torch"]
    assert "the list has 'nothing'" in licences.problems(listed)[0]
    monkeypatch.setattr(licences, "needed", lambda: {"evil": "", "fair": ""})
    monkeypatch.setattr(licences, "licence", {"evil": "AGPL-3.0", "fair": "LGPL-3.0"}.get)
    (problem,) = licences.problems({"evil": "AGPL-3.0", "fair": "LGPL-3.0"})
    assert "evil has the licence 'AGPL-3.0'" in problem
