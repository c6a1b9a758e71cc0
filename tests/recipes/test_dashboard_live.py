"""The dashboard in a browser while a recipe trains on the real server."""

import re

import pytest
from browser import chromium, pictures
from playwright.sync_api import expect

pytestmark = pytest.mark.timeout(700)


@pytest.mark.full
def test_curves_move_while_a_recipe_runs(recipes):
    with chromium() as browser:
        page = browser.new_page(viewport={"width": 1200, "height": 1000})
        page.goto(recipes.url)
        page.get_by_role("status").get_by_text("ready").wait_for()
        running = recipes.start("shorter", "max_steps=3", "batch_size=2", "max_tokens=32", label="watched")
        loss = page.get_by_role("article").get_by_role("img", name=re.compile("^loss of "))
        expect(loss).to_have_accessible_name(re.compile(" at step 1, "), timeout=300_000)
        # The recipe samples and trains on; the page follows by itself.
        expect(loss).to_have_accessible_name(re.compile(" at step 2, "), timeout=200_000)
        assert loss.locator("path").get_attribute("d").count("L") == 1
        expect(page.get_by_role("region", name="Versions and samplers")).to_contain_text(":train:")
        drift = page.get_by_role("article").get_by_role("img", name=re.compile("^sampler against trainer"))
        near = float(re.search(r": (\S+) at step", drift.get_attribute("aria-label"))[1])
        assert abs(near) < 1e-3
        page.screenshot(path=pictures() / "dashboard-recipe.png", full_page=True)
        running.finish(300)
