"""The dashboard in a real browser: what it shows, what can be done with it, and by whom."""

import re
import tarfile

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_server import FakeServer
from playwright.sync_api import expect
from raw import Raw

from verl_tinker.core.access import Keys
from verl_tinker.core.errors import EngineError

pytestmark = pytest.mark.timeout(240)
PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}


def train(raw, seqs):
    """One step for each pair of numbers."""
    for seq in seqs:
        raw.result(raw.forward_backward(seq))
        raw.result(raw.optim_step(seq + 1))


@pytest.fixture
def busy(server, raw):
    """Steps, saved weights, a snapshot, an error, and a command that is held."""
    train(raw, range(1, 9, 2))
    raw.state = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=9, path="state")["request_id"])["path"]
    saved = raw.post("save_weights_for_sampler", model_id=raw.model, seq_id=10, path="first")
    raw.weights = raw.result(saved["request_id"])["path"]
    raw.sampler = raw.result(raw.snapshot(11, 5))["sampling_session_id"]
    server.engine.fail["optim_step"] = EngineError("worker 0 <b>died</b>")
    raw.result(raw.forward_backward(12))
    raw.result(raw.optim_step(13))
    server.engine.hold.add("forward_backward")
    raw.forward_backward(14)
    raw.optim_step(15)
    yield raw
    server.engine.hold.clear()


def section(page, name):
    return page.get_by_role("region", name=name)


def curve(page, raw, name):
    return page.get_by_role("article", name=f"Run {raw.model}").get_by_role("img", name=re.compile(f"^{name} of "))


def test_curves_move_while_a_run_trains(server, raw, visit):
    page = visit(server.url)
    train(raw, (1, 3))
    loss = curve(page, raw, "loss")
    expect(loss).to_have_accessible_name(re.compile(r": .* at step 2, "))
    before = loss.locator("path").get_attribute("d")
    train(raw, (5, 7, 9))
    expect(loss).to_have_accessible_name(re.compile(r" at step 5, "))
    after = loss.locator("path").get_attribute("d")
    assert before.count("L") == 1 and after.count("L") == 4
    # Four tokens of weight 1: each step adds 0.04 to the weight, so the loss falls from 1.01.
    expect(loss).to_have_accessible_name(re.compile(r"and 1\.01$"))
    expect(curve(page, raw, "gradient norm")).to_have_accessible_name(re.compile(r": 4 at step 5"))
    expect(page.get_by_role("article")).to_contain_text("step 5, weights version 6; rests")


def test_each_part_shows_what_the_server_holds(server, busy, visit):
    page = visit(server.url)
    pending = section(page, "Pending")
    expect(pending).to_contain_text("forward_backward is running")
    expect(pending).to_contain_text("0 commands of this run are before it; forward_backward of this run is running")
    versions = section(page, "Versions and samplers")
    expect(versions.get_by_role("row").filter(has_text=busy.weights)).to_contain_text("saved")
    expect(versions.get_by_role("row").filter(has_text=busy.sampler)).to_contain_text("snapshot")
    errors = section(page, "Recent errors")
    expect(errors).to_contain_text("worker 0 <b>died</b>")
    assert errors.locator("b").count() == 0
    expect(section(page, "Checkpoints")).to_contain_text(busy.state)
    expect(section(page, "Memory")).to_contain_text("server")
    now = section(page, "Now")
    expect(now).to_contain_text("1 forward_backward")
    expect(now).to_contain_text("1 optim_step")
    expect(page.get_by_role("article")).to_contain_text("fake/tied, adapter of rank 4, step 4")


def test_a_checkpoint_is_downloaded_and_deleted_by_clicks(server, busy, visit, tmp_path):
    page = visit(server.url)
    with page.expect_download() as download:
        page.get_by_role("button", name=f"Download {busy.weights}").click()
    download.value.save_as(tmp_path / "got.tar")
    assert "sampler.json" in tarfile.open(tmp_path / "got.tar").getnames()
    remove = page.get_by_role("button", name=f"Delete {busy.state}")
    remove.click()
    dialog = page.get_by_role("dialog", name="Delete this checkpoint?")
    expect(dialog).to_contain_text(busy.state)
    dialog.get_by_role("button", name="Keep").click()
    expect(dialog).to_be_hidden()
    assert busy.http.get("/checkpoints").json()["cursor"]["total_count"] == 2
    remove.click()
    dialog.get_by_role("button", name="Delete").click()
    expect(page.get_by_role("alert")).to_contain_text(f"Deleted {busy.state}")
    expect(section(page, "Checkpoints")).not_to_contain_text(busy.state)
    assert [c["tinker_path"] for c in busy.http.get("/checkpoints").json()["checkpoints"]] == [busy.weights]


def test_everything_can_be_done_with_the_keyboard(server, busy, visit):
    page = visit(server.url)
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the runs")).to_be_focused()
    loss = curve(page, busy, "loss")
    loss.focus()
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    expect(loss).to_have_accessible_name(re.compile(" at step 3, "))
    page.keyboard.press("Home")
    expect(page.get_by_role("article").get_by_role("status").first).to_have_text(re.compile("^step 1: 1.01"))
    page.keyboard.press("Escape")
    expect(loss).to_have_accessible_name(re.compile(" at step 4, "))
    remove = page.get_by_role("button", name=f"Delete {busy.state}")
    remove.focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Delete this checkpoint?")
    expect(dialog.get_by_role("button", name="Keep")).to_be_focused()
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    # The page goes on to be drawn; what had the focus keeps it.
    page.wait_for_timeout(2500)
    expect(remove).to_be_focused()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_is_accessible_in_both_schemes_and_keeps_its_picture(server, busy, visit, scheme, screenshots):
    page = visit(server.url, color_scheme=scheme, viewport={"width": 1200, "height": 1400})
    expect(curve(page, busy, "loss")).to_be_visible()
    expect(section(page, "Checkpoints")).to_contain_text(busy.state)
    found = Axe().run(page)
    assert found.violations_count == 0, found.generate_report()
    page.screenshot(path=screenshots / f"dashboard-{scheme}.png", full_page=True)


def test_dark_follows_the_system_until_somebody_chooses(server, visit):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page = visit(server.url, color_scheme="dark")
    dark = background(page)
    button = page.get_by_role("button", name="Dark")
    expect(button).to_have_attribute("aria-pressed", "true")
    button.click()
    light = background(page)
    assert light != dark
    page.reload()
    assert background(page) == light
    assert background(visit(server.url, color_scheme="light")) == light


def test_it_fits_a_phone(server, busy, visit, screenshots):
    page = visit(server.url, **PHONE)
    expect(section(page, "Checkpoints")).to_contain_text(busy.state)
    expect(curve(page, busy, "loss")).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    assert Axe().run(page).violations_count == 0
    page.screenshot(path=screenshots / "dashboard-phone.png", full_page=True)


def test_it_asks_nobody_but_its_server(server, busy, visit, chromium):
    asked = []
    page = chromium.new_context().new_page()
    page.on("request", lambda request: asked.append(request.url))
    page.goto(server.url)
    expect(curve(page, busy, "loss")).to_be_visible()
    assert {httpx.URL(url).netloc for url in asked if not url.startswith("data:")} == {httpx.URL(server.url).netloc}
    policy = httpx.get(server.url, verify=False).headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    page.context.close()


def test_with_keys_each_visitor_sees_what_is_its_own(start, visit, tmp_path):
    keys = Keys(tmp_path / "keys.json")
    secrets = {name: keys.add(name) for name in ("alice", "bob")}
    server = start(keys=keys)
    raws = {}
    for name, secret in secrets.items():
        http = server.http()
        http.headers["X-API-Key"] = secret
        raws[name] = raw = Raw(http)
        raw.create()
        train(raw, (1,))
        raw.state = raw.result(raw.post("save_weights", model_id=raw.model, seq_id=3, path="s")["request_id"])["path"]
    page = visit(server.url, wait="needs a key")
    dialog = page.get_by_role("dialog", name="API key")
    expect(dialog).to_contain_text("API key is missing or not known")
    dialog.get_by_label("Key", exact=True).fill("tml-wrong")
    dialog.get_by_role("button", name="Use").click()
    expect(dialog).to_be_hidden()
    expect(dialog).to_be_visible()
    dialog.get_by_label("Key", exact=True).fill(secrets["alice"])
    dialog.get_by_role("button", name="Use").click()
    expect(page.get_by_role("article")).to_have_accessible_name(f"Run {raws['alice'].model}")
    expect(section(page, "Checkpoints")).to_contain_text(raws["alice"].state)
    assert raws["bob"].model not in page.content()
    assert secrets["alice"] not in page.url + page.evaluate("JSON.stringify(localStorage) + document.cookie")
    for raw in raws.values():
        raw.http.close()


def test_a_server_that_starts_says_what_it_does(start, visit):
    visit(start(ready=False).url, wait="starting: loading fake weights")


@pytest.mark.full
def test_it_comes_back_with_its_server(tmp_path, visit):
    server = FakeServer(tmp_path).start()
    try:
        page = visit(server.url)
        server.stop()
        page.get_by_role("status").get_by_text("no connection").wait_for()
        server.start()
        page.get_by_role("status").get_by_text("ready").wait_for()
    finally:
        server.stop()
