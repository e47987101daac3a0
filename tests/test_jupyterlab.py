"""Notebook 03 as a reader meets it: in JupyterLab, in a browser, with mouse and keyboard.

A screenshot of every step goes to the folder NANOTEACH_SCREENSHOTS, or to the test's own.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from course_cases import Answer, all_answers

from nanoteach.course.environment import notebook_environment
from nanoteach.course.progress import start

pytest.importorskip("selenium", reason="JupyterLab is not opened: pip install selenium")
from selenium.webdriver import ActionChains, Chrome, ChromeOptions, ChromeService, Keys
from selenium.webdriver.remote.webelement import WebElement

T = TypeVar("T")

NOTEBOOK = "03_paged_blocks.ipynb"
TARGET = "nanoteach.block_manager.blocks_needed"
PATIENCE = 300.0  # seconds for a wait: the machine may have other work
PROMPT = ".jp-CodeCell .jp-InputPrompt"
OUTPUT = ".jp-OutputArea-output"
RED = f"{OUTPUT}:is([data-mime-type$='.error'], [data-mime-type$='.stderr'])"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SETTINGS = {
    # All cells are in the page, not only those in sight.
    "notebook-extension/tracker": {"windowingMode": "none"},
    # Nothing pops up.
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
}


def until(what: str, look: Callable[[], T]) -> T:
    """What `look` returns, as soon as that is something."""
    end = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > end:
            pytest.fail(f"waited in vain until {what}")
        time.sleep(0.2)
    return found


class Page:
    """JupyterLab in a browser, and what a reader does there."""

    def __init__(self, browser: Chrome, screenshots: Path) -> None:
        self.browser = browser
        self.screenshots = screenshots
        self.num_screenshots = 0

    def until(self, what: str, script: str, *arguments: Any) -> Any:
        """What an expression of JavaScript comes to, as soon as that is something."""
        return until(what, lambda: self.browser.execute_script(f"return {script}", *arguments))

    def find(self, selector: str, text: str = "", within: WebElement | None = None) -> WebElement:
        """The first element that is shown, matches and has this text, in the middle of the page."""
        script = """[...(arguments[2] ?? document).querySelectorAll(arguments[0])].find(
            element => element.textContent.includes(arguments[1]) && element.checkVisibility())"""
        what = f"there is {selector} {text}".rstrip()
        found: WebElement = self.until(what, script, selector, text, within)
        self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", found)
        return found

    def texts(self, selector: str) -> list[str]:
        """The text of every element that matches."""
        script = """return [...document.querySelectorAll(arguments[0])].map(e => e.textContent)"""
        return list(self.browser.execute_script(script, selector))

    def choose(self, menu: str, command: str) -> None:
        """Choose from a menu."""
        self.find(".lm-MenuBar-item", menu).click()
        self.find(f'.lm-Menu-item[data-command="{command}"]').click()

    def write(self, cell: WebElement, line: str) -> None:
        """Write this in the place of the last line of a cell, and run it."""
        cell.find_elements("css selector", ".cm-line")[-1].click()
        hands = ActionChains(self.browser).send_keys(Keys.END)
        hands.key_down(Keys.SHIFT).send_keys(Keys.HOME).key_up(Keys.SHIFT).send_keys(line)
        hands.key_down(Keys.SHIFT).send_keys(Keys.ENTER).key_up(Keys.SHIFT).perform()

    def shoot(self, name: str, element: WebElement | None = None) -> None:
        """Keep a screenshot, with the element in the middle of it."""
        if element:
            self.browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", element)
        self.num_screenshots += 1
        path = self.screenshots / f"{self.num_screenshots}_{name}.png"
        assert self.browser.save_screenshot(str(path))


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chrome]:
    """A browser that shows its windows to nobody."""
    binary = next(filter(None, map(shutil.which, BROWSERS)), None)
    driver = shutil.which("chromedriver")
    if not binary or not driver:
        pytest.skip(
            "JupyterLab is not opened: no chromium with chromedriver on the PATH. "
            "On Debian: apt install chromium chromium-driver"
        )
    options = ChromeOptions()
    options.binary_location = binary
    for argument in (
        "--headless=new",
        "--window-size=1400,1000",
        f"--user-data-dir={tmp_path / 'browser'}",
        # It meets our own page alone, and has to start in containers and as root.
        "--no-sandbox",
        "--disable-dev-shm-usage",
    ):
        options.add_argument(argument)
    browser = Chrome(options, ChromeService(driver))
    yield browser
    browser.quit()


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """A learner's folder."""
    start(tmp_path / "course")
    return tmp_path / "course"


@pytest.fixture
def jupyterlab(tmp_path: Path, course: Path) -> Iterator[str]:
    """The address of a JupyterLab that is in the course's folder and knows nothing of its user."""
    folders = {f"JUPYTER_{name}_DIR": tmp_path / name for name in ("CONFIG", "DATA", "RUNTIME")}
    for name, settings in SETTINGS.items():
        path = tmp_path / "CONFIG/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(settings))
    environment = os.environ | notebook_environment(tmp_path / "progress")
    environment |= {name: str(folder) for name, folder in folders.items()}
    command = [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root"]
    command += ["--ServerApp.port=0", f"--ServerApp.root_dir={course}"]

    def announced() -> dict[str, Any]:
        if server.poll() is not None:
            pytest.fail(f"JupyterLab ended:\n{(tmp_path / 'jupyterlab.log').read_text()}")
        for path in (tmp_path / "RUNTIME").glob("jpserver-*.json"):
            if (text := path.read_text()).endswith("}"):  # it is written to its end
                return dict(json.loads(text))
        return {}

    with (
        (tmp_path / "jupyterlab.log").open("w") as log,
        subprocess.Popen(command, cwd=course, env=environment, stdout=log, stderr=log) as server,
    ):
        try:
            at = until("JupyterLab says its address", announced)
            yield f"{at['url']}lab/tree/{NOTEBOOK}?token={at['token']}"
        finally:
            server.terminate()  # and it ends its kernels
            try:
                server.wait(60)
            except subprocess.TimeoutExpired:
                server.kill()


@pytest.fixture
def page(browser: Chrome, jupyterlab: str, tmp_path: Path) -> Iterator[Page]:
    """The notebook, opened."""
    screenshots = Path(os.environ.get("NANOTEACH_SCREENSHOTS") or tmp_path / "screenshots")
    screenshots.mkdir(parents=True, exist_ok=True)
    page = Page(browser, screenshots)
    browser.get(jupyterlab)
    page.find(".jp-StatusBar-TextItem", "| Idle")
    yield page
    page.shoot("end")  # which shows where it stopped, if it stopped


def test_a_reader_runs_notebook_03_answers_and_turns_a_knob(
    page: Page, course: Path, tmp_path: Path
) -> None:
    page.shoot("opened")
    cells = json.loads((course / NOTEBOOK).read_text(encoding="utf-8"))["cells"]
    num_cells = sum(cell["cell_type"] == "code" for cell in cells)
    run_to_the_end(page, num_cells)
    answer(page, tmp_path / "progress")
    turn(page)


def run_to_the_end(page: Page, num_cells: int) -> None:
    """Everything runs, and nothing is red: not even what is still to be answered."""
    page.choose("Edit", "editmenu:clear-all")
    until("nothing has run", lambda: set(page.texts(PROMPT)) == {"[ ]:"})
    page.choose("Run", "runmenu:run-all")
    done = [f"[{i}]:" for i in range(1, num_cells + 1)]
    until("all has run", lambda: page.texts(RED) or page.texts(PROMPT) == done)
    page.shoot("ran")
    assert page.texts(RED) == []
    assert sum("not written here yet" in text for text in page.texts(OUTPUT)) == 4


def answer(page: Page, progress: Path) -> None:
    """Wrongly, and then rightly."""
    answers = {answer.name: answer for answer in all_answers() if answer.target == TARGET}
    wrong, right = answers["rounds_down"], answers["blocks_needed"]
    cell = page.find(".jp-CodeCell", f'@exercise("{TARGET}")')
    page.shoot("exercise", cell)

    page.write(cell, last_line(wrong))
    message = page.find(OUTPUT, "blocks_needed: not right yet.", cell).text
    page.shoot("wrong", cell)
    for words in ("case", "expected", "got", wrong.words, "The notebook goes on"):
        assert words in message
    assert not list(progress.glob("*.py"))

    page.write(cell, last_line(right))
    message = page.find(OUTPUT, "blocks_needed: right.", cell).text
    page.shoot("right", cell)
    assert "Your version now runs in the engine, and is kept." in message
    assert last_line(right) in (progress / f"{TARGET}.py").read_text()


def last_line(answer: Answer) -> str:
    """All that is to be written in the place of a stub's dots."""
    return answer.source.splitlines()[-1].strip()


def turn(page: Page) -> None:
    """A slider and two buttons: the words say what was set, and the picture is another."""
    cell = page.find(".jp-CodeCell", "widgets.block_table_explorer()")
    handle = page.find(".noUi-handle", within=cell)
    (readout,) = cell.find_elements("css selector", ".widget-readout")
    (picture,) = cell.find_elements("css selector", "img")
    page.shoot("widget", picture)
    before = readout.text, picture.get_attribute("src")

    ActionChains(page.browser).drag_and_drop_by_offset(handle, 40, 0).perform()
    until("the slider shows its value", lambda: readout.text != before[0])
    page.find("button", "add a request", cell).click()
    page.find("pre", f"is in the queue, with {readout.text} prompt tokens", cell)
    page.find("button", "step", cell).click()
    page.find("pre", f"{readout.text} of D", cell)
    loaded = "arguments[0].naturalWidth && arguments[0].src != arguments[1]"
    page.until("the picture is another", loaded, picture, before[1])
    page.shoot("turned", picture)
