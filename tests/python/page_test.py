"""Drives the pages of `mha map` in a real browser.

    python page_test.py MHA

MHA is the program. Guards what the C++ tests cannot see: that the page and the SVG document work
where they are read. Weights on the page are compared with those that were stored; the page shows
four decimals, and 16 bits of the root leave an error below one unit of the last.

Without Selenium, Chromium or its driver it ends with 77 and a line that says what is missing.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SKIPPED = 77
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
DRIVER = shutil.which("chromedriver")

try:
    import numpy as np
    from safetensors.numpy import save_file
    from selenium import webdriver
    from selenium.webdriver import ActionChains, Keys
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait
except ImportError as error:
    print(f"SKIPPED: {error}; `bash cmake/bootstrap.sh test` installs it")
    sys.exit(SKIPPED)

HEADS, LENGTH = 3, 8
HOSTILE = "<b id=hit>x</b>"  # would be window.hit
TOKENS = ["[CLS]", "the", HOSTILE, "sat", "on", "the", "\u30de\u30c3\u30c8", "[SEP]"]


def random_maps(heads, length, causal):
    """Softmax of random scores, (1, heads, length, length)."""
    scores = np.random.default_rng(1).normal(size=(1, heads, length, length)) * 2
    if causal:
        scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)).astype(np.float32)


def number(text):
    """The number at the end of a text; numbers of no digits are shown as about zero."""
    return float(text.split()[-1])


class PageTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.TemporaryDirectory(prefix="mha-page-")
        cls.addClassCleanup(cls.folder.cleanup)
        options = webdriver.ChromeOptions()
        options.binary_location = CHROMIUM
        # The sandbox needs rights that containers lack; these pages are our own.
        for argument in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "disable-gpu"):
            options.add_argument(f"--{argument}")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        cls.browser = webdriver.Chrome(options, webdriver.ChromeService(DRIVER))
        cls.addClassCleanup(cls.browser.quit)
        cls.browser.set_window_size(1300, 950)
        cls.weights = random_maps(HEADS, LENGTH, causal=True)
        cls.small = cls.draw("small.html", cls.weights, tokens=TOKENS)

    @classmethod
    def draw(cls, name, weights, tokens=None):
        folder = Path(cls.folder.name)
        save_file({"weights": weights}, folder / "w.safetensors")
        command = [MHA, "map", "--maps", folder / "w.safetensors", "--output", folder / name]
        command += ["--title", "</title><i>maps</i>"]
        if tokens:
            (folder / "tokens.txt").write_text("\n".join(tokens) + "\n", encoding="utf-8")
            command += ["--tokens", folder / "tokens.txt"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        return (folder / name).as_uri()

    def setUp(self):
        self.media("light")
        self.open(self.small)

    def tearDown(self):
        errors = [line for line in self.browser.get_log("browser") if line["level"] == "SEVERE"]
        self.assertEqual(errors, [])

    # --- what the tests do and read ---

    def open(self, address):
        self.browser.get(address)
        self.wait("return document.body.dataset.shown !== undefined")

    def media(self, scheme):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def script(self, text, *arguments):
        return self.browser.execute_script(text, *arguments)

    def wait(self, condition):
        WebDriverWait(self.browser, 300).until(lambda browser: browser.execute_script(condition))

    def shown(self, head, query=None, key=None):
        """Waits until that head is shown, with the chosen query and key if given."""
        wanted = [str(head), *(str(index) for index in (query, key) if index is not None)]
        self.wait(f'return document.body.dataset.shown.startsWith("{" ".join(wanted)}")')

    def find(self, selector):
        return self.browser.find_element(By.CSS_SELECTOR, selector)

    def choose(self, head):
        self.find(f'#heads input[value="{head}"]').click()
        self.shown(head)

    def cell(self, query, key):
        """The middle of a cell, in CSS pixels from the canvas's middle and from its corner."""
        canvas = self.find("#map canvas")
        left, top, x, y = map(float, canvas.get_attribute("data-layout").split())
        at = left + (key + 0.5) * x, top + (query + 0.5) * y
        box = canvas.rect
        return canvas, (round(at[0] - box["width"] / 2), round(at[1] - box["height"] / 2)), at

    def point_at(self, query, key):
        canvas, offset, _ = self.cell(query, key)
        ActionChains(self.browser, 0).move_to_element_with_offset(canvas, *offset).perform()

    def pixel(self, query, key):
        _, _, at = self.cell(query, key)
        return self.script(
            "const ratio = devicePixelRatio;"
            'const context = document.querySelector("#map canvas").getContext("2d");'
            "return [...context.getImageData(arguments[0] * ratio, arguments[1] * ratio, 1, 1).data]",
            *at,
        )

    def strongest(self):
        rows = self.browser.find_elements(By.CSS_SELECTOR, "#strongest li")
        return [(row.find_element(By.CLASS_NAME, "name").text,
                 number(row.find_element(By.CLASS_NAME, "value").text)) for row in rows]

    def expect_row(self, row, limit=10):
        """Checks the listed keys against one row of weights."""
        order = [int(key) for key in np.argsort(-row, kind="stable") if row[key] > 0][:limit]
        listed = self.strongest()
        self.assertEqual([int(name.split()[0]) for name, _ in listed], order)
        np.testing.assert_allclose([value for _, value in listed], row[order], atol=1e-4)

    # --- tests ---

    def test_hovering_a_token_shows_its_row(self):
        for head in range(HEADS):
            self.choose(head)
            for query in (3, 7):
                token = self.find(f'#strips [data-query="{query}"]')
                ActionChains(self.browser, 0).move_to_element(token).perform()
                self.shown(head, query)
                self.assertEqual(self.find("#chosen").text, f"Query {query} {TOKENS[query]}")
                self.expect_row(self.weights[0, head, query])

    def test_hovering_a_cell_shows_its_weight(self):
        self.choose(1)
        self.point_at(6, 4)
        self.shown("1", 6, 4)
        tip = self.find("#tip").text
        self.assertTrue(tip.startswith(f"6 {TOKENS[6]} \u2192 4 on"), tip)
        self.assertAlmostEqual(number(tip), self.weights[0, 1, 6, 4], delta=1e-4)
        self.point_at(2, 6)
        self.shown("1", 2, 6)
        self.assertTrue(self.find("#tip").text.endswith("blank"))

    def test_cells_have_the_colours_of_their_weights(self):
        self.choose(2)
        largest = np.unravel_index(self.weights[0].argmax(), self.weights[0].shape)
        self.choose(int(largest[0]))
        self.assertEqual(self.pixel(int(largest[1]), int(largest[2])), [0xF7, 0xEE, 0x5A, 255])
        self.assertEqual(self.pixel(1, 6)[3], 0)  # blank: nothing is drawn

    def test_a_click_holds_the_row(self):
        self.choose(0)
        self.point_at(5, 1)
        ActionChains(self.browser, 0).click().perform()
        self.point_at(7, 3)
        self.shown("0", 5, 3)
        self.assertIn("Held", self.find("#pin").text)
        ActionChains(self.browser, 0).send_keys(Keys.ESCAPE).perform()
        self.point_at(7, 2)
        self.shown("0", 7, 2)

    def test_the_keyboard_reaches_everything(self):
        press = lambda *keys: ActionChains(self.browser, 0).send_keys(*keys).perform()
        self.find('#heads input[value="all"]').send_keys(Keys.ARROW_RIGHT)  # as in any radio group
        self.shown(HEADS)
        press(Keys.ARROW_RIGHT)
        self.shown("0")
        self.script('document.getElementById("map").focus()')
        press(Keys.PAGE_DOWN)
        self.shown("1", 1, 0)
        press(Keys.ARROW_DOWN, Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
        self.shown("1", 3, 1)
        said = self.find("#announcement").get_attribute("textContent")
        self.assertTrue(said.startswith("head 1, query 3 sat, key 1 the: "), said)
        self.assertAlmostEqual(number(said), self.weights[0, 1, 3, 1], delta=1e-4)
        press(Keys.END)
        self.shown("1", 3, LENGTH - 1)
        press("m")
        self.shown(HEADS)
        press("a")
        self.shown("all")

    def test_the_grid_shows_every_head_and_a_click_opens_one(self):
        maps = self.browser.find_elements(By.CSS_SELECTOR, "#grid button")
        self.assertEqual(len(maps), HEADS)
        self.assertEqual(len({self.script("return arguments[0].firstChild.toDataURL()", m)
                              for m in maps}), HEADS)
        row = self.weights[0, :, 1]
        np.testing.assert_allclose([value for _, value in self.strongest()], row.max(-1), atol=1e-4)
        maps[2].click()
        self.shown("2")
        self.assertTrue(self.find("#map canvas").is_displayed())
        self.assertFalse(self.find("#grid").is_displayed())

    def test_the_mean_is_that_of_the_heads(self):
        self.choose(HEADS)
        token = self.find('#strips [data-query="7"]')
        ActionChains(self.browser, 0).move_to_element(token).perform()
        self.shown(HEADS, 7)
        self.expect_row(self.weights[0, :, 7].mean(0))

    def test_dark_and_light_follow_the_system_and_the_button(self):
        paper = lambda: sum(map(int, re.findall(r"\d+", self.script(
            "return getComputedStyle(document.body).backgroundColor"))[:3])) / 3
        self.assertGreater(paper(), 200)
        self.media("dark")
        self.assertLess(paper(), 60)
        self.find("#theme").click()
        self.assertGreater(paper(), 200)
        self.find("#theme").click()
        self.assertLess(paper(), 60)

    def test_labels_and_titles_are_text(self):
        self.assertEqual(self.find("h1").text, "</title><i>maps</i>")
        self.assertEqual(self.browser.title, "</title><i>maps</i>")
        self.assertEqual(self.find('#strips [data-query="2"]').text, HOSTILE)
        self.choose(0)
        self.point_at(3, 2)
        self.shown("0", 3, 2)
        self.assertIn(HOSTILE, self.find("#tip").text)
        self.assertEqual(self.script(
            "return [window.hit === undefined, document.images.length,"
            'document.querySelectorAll("header i, iframe").length,'
            'performance.getEntriesByType("resource").length]'), [True, 0, 0, 0])

    def test_a_narrow_window_needs_no_sideways_scrolling(self):
        self.browser.set_window_size(520, 900)
        try:
            for head in ("all", 1):
                self.choose(head)
                self.wait("return document.documentElement.scrollWidth <= innerWidth")
        finally:
            self.browser.set_window_size(1300, 950)

    def test_512_tokens_and_12_heads_work(self):
        weights = random_maps(12, 512, causal=True)
        self.open(self.draw("long.html", weights))
        self.assertEqual(len(self.browser.find_elements(By.CSS_SELECTOR, "#grid canvas")), 12)
        self.choose(11)
        for near in ((300, 250), (510, 1)):
            self.point_at(*near)
            # A cell is one pixel, so the pointer may stand at its neighbour.
            self.wait('const [, query, key] = document.body.dataset.shown.split(" ");'
                      f"return Math.hypot(query - {near[0]}, key - {near[1]}) < 2")
            shown = self.script("return document.body.dataset.shown").split()
            query, key = map(int, shown[1:])
            value = number(self.find("#tip").text)
            self.assertAlmostEqual(value, weights[0, 11, query, key], delta=1e-4)
            self.expect_row(weights[0, 11, query])

    def test_the_svg_document_is_one_and_holds_every_label(self):
        self.browser.get(self.draw("small.svg", self.weights, tokens=TOKENS))
        name, texts, paths = self.script(
            "return [document.documentElement.nodeName,"
            '[...document.querySelectorAll("text")].map((text) => text.textContent),'
            'document.querySelectorAll("g.map path").length]')
        self.assertEqual(name, "svg")
        self.assertLessEqual({*TOKENS, "head 0", "head 2", "</title><i>maps</i>"}, set(texts))
        self.assertGreater(paths, 20)


if __name__ == "__main__":
    if CHROMIUM is None or DRIVER is None:
        print("SKIPPED: no chromium or no chromedriver; `bash cmake/bootstrap.sh test` installs both")
        sys.exit(SKIPPED)
    MHA = sys.argv.pop(1)
    unittest.main()
