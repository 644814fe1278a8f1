"""Every notebook in JupyterLab, and every page of the site, in a real browser: run by ``make browser`` alone (marker ``browser``).

What a widget has is read from the page: a control of a kind that nobody here can operate is a failure, not a skip. A screenshot of every widget
goes into the folder that the environment variable SCREENSHOTS names, or into pytest's own.
"""

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import unquote, urldefrag, urljoin, urlparse
from urllib.request import urlopen

import notebooks as tool
import pytest
from nbformat.v4 import new_output
from test_notebook_contract import PATHS, code_cells, read, tags

ROOT = Path(__file__).resolve().parent.parent
PAGES = [*PATHS, *sorted(tool.RUNS.glob("*/*.ipynb"))]
pytestmark = pytest.mark.browser
RUN_SECONDS, BEGIN_SECONDS, DRAW_SECONDS = 900, 10, 300  # a notebook takes a minute and the model's answer half of one, where nothing else runs
SETTINGS = {
    "apputils-extension/notification": {"fetchNews": "false", "checkForUpdates": False},
    "notebook-extension/tracker": {"windowingMode": "none"},  # every cell is on the page, also what lies outside the window
}
# selector of a control in the widget's row: (what tells its value, key sequences to try, one after the other)
CONTROLS = {
    ".noUi-handle": ("e.ariaValueNow", [["ArrowRight"], ["ArrowLeft"]]),
    "select": ("e.selectedIndex", [["Space", "ArrowDown", "Enter"], ["Space", "ArrowUp", "Enter"]]),  # JupyterLab keeps arrows from a closed menu
    ".widget-toggle-button": ("[...e.parentElement.children].findIndex(b => b.matches('.mod-active'))", [["Space"], ["Tab", "Space"]]),
    "input[type=checkbox]": ("e.checked", [["Space"]]),
}
STATE = """async box => {
    const picture = box.querySelector('img'), bytes = new Uint8Array(await (await fetch(picture.src)).arrayBuffer());
    return [box.querySelector('.widget-html-content').innerText, picture.title, String(bytes)];
}"""
WATCH = """box => {
    box.draws = 0;
    new MutationObserver(() => box.draws++).observe(box.querySelector('.widget-html'), {childList: true, characterData: true, subtree: true});
}"""
DRAWN = "box => box.querySelector('.widget-html-content').innerText != 'drawing...'"
IDLE = "document.querySelector('.jp-Notebook-ExecutionIndicator')?.dataset.status == 'idle'"
PROMPTS = "[...document.querySelectorAll('.jp-Notebook .jp-CodeCell .jp-InputArea-prompt')].map(e => e.textContent)"
# (text, contrast with what lies behind it as WCAG counts it, 1 to 21) of every element that has a text of its own
CONTRASTS = r"""box => {
    const rgba = colour => { const n = colour.match(/[\d.]+/g).map(Number); return n.length < 4 ? [...n, 1] : n; };
    const over = (top, below) => [0, 1, 2].map(i => top[3] * top[i] + (1 - top[3]) * below[i]);
    const behind = e => {
        if (!e) return [255, 255, 255];
        const own = rgba(getComputedStyle(e).backgroundColor);
        return own[3] == 1 ? own.slice(0, 3) : over(own, behind(e.parentElement));
    };
    const light = rgb => {
        const [r, g, b] = rgb.map(x => x / 255).map(x => x <= 0.04045 ? x / 12.92 : ((x + 0.055) / 1.055) ** 2.4);
        return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const texts = [...box.querySelectorAll('*')].filter(e => e.checkVisibility() && e.tagName != 'OPTION')
        .filter(e => e.tagName == 'SELECT' || [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()));
    return texts.map(e => {
        const below = behind(e), [low, high] = [light(below), light(over(rgba(getComputedStyle(e).color), below))].sort((a, b) => a - b);
        return [e.tagName == 'SELECT' ? e.value : e.textContent.trim(), (high + 0.05) / (low + 0.05)];
    });
}"""
CORNER = """picture => {
    const canvas = document.createElement('canvas'), context = canvas.getContext('2d');
    context.drawImage(picture, 0, 0);
    return [...context.getImageData(0, 0, 1, 1).data];
}"""


@pytest.fixture(scope="module")
def browser():
    """Chromium: the machine's own, or the one that playwright has installed."""
    from playwright.sync_api import sync_playwright  # here, because only these tests need it

    with sync_playwright() as playwright:
        found = shutil.which("chromium") or shutil.which("google-chrome")
        chromium = playwright.chromium.launch(executable_path=found, chromium_sandbox=False)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    folder = Path(os.environ.get("SCREENSHOTS") or tmp_path_factory.mktemp("screenshots"))
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """Address of a JupyterLab over a copy of the notebooks, with settings of its own; its kernels use the package of this tree."""
    root = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", root / "notebooks", ignore=shutil.ignore_patterns(".ipynb_checkpoints"))
    (root / "data").symlink_to(ROOT / "data")
    for name, settings in SETTINGS.items():
        file = root / f"settings/@jupyterlab/{name}.jupyterlab-settings"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(settings))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    own = dict(JUPYTERLAB_SETTINGS_DIR="settings", JUPYTERLAB_WORKSPACES_DIR="workspaces", JUPYTER_CONFIG_DIR="config", JUPYTER_RUNTIME_DIR="runtime")
    command = f"-m jupyterlab --no-browser --allow-root --ip=127.0.0.1 --port={port} --ServerApp.port_retries=0 --IdentityProvider.token= --ServerApp.password="
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **{name: str(root / folder) for name, folder in own.items()}}
    with (root / "log").open("w") as log:
        server = subprocess.Popen([sys.executable, *command.split()], cwd=root, env=environment, stdout=log, stderr=log)
    address = f"http://127.0.0.1:{port}/lab"
    for _ in range(120):
        with contextlib.suppress(OSError):
            urlopen(address)
            break
        assert server.poll() is None, (root / "log").read_text()
        time.sleep(1)
    yield address
    server.terminate()
    server.wait()


def choose(page, *names):
    """Choose an entry of the menus, such as "Run", "Run All Cells"."""
    menu, *between, last = names
    page.locator(".lm-MenuBar-item", has_text=menu).click()
    for name in between:
        page.locator(".lm-Menu-item", has=page.get_by_text(name, exact=True)).hover()
    page.locator(".lm-Menu-item", has=page.get_by_text(last, exact=True)).click()


@pytest.fixture(scope="module", params=PATHS, ids=lambda path: path.stem)
def opened(request, lab, browser):
    """A notebook after Run All Cells, in a window 1280 pixels wide: its .page, .cells (as stored), .shown (the page's cells) and .name."""
    page = browser.new_page(viewport=dict(width=1280, height=900))
    page.set_default_timeout(60_000)
    page.goto(f"{lab}/tree/notebooks/{request.param.name}?reset")  # without the notebooks of the last visit
    page.get_by_text("| Idle").wait_for()  # the kernel's own word: the notebook's indicator says idle before there is one
    before = page.evaluate(PROMPTS)
    choose(page, "Run", "Run All Cells")
    page.wait_for_function(f"before => String({PROMPTS}) != before", arg=",".join(before))
    page.wait_for_function(f"{IDLE} && !String({PROMPTS}).includes('*')", timeout=1000 * RUN_SECONDS)
    cells = read(request.param).cells
    shown = page.locator(".jp-Notebook .jp-Cell")
    assert shown.count() == len(cells)
    yield SimpleNamespace(page=page, cells=cells, shown=shown, name=request.param.stem)
    choose(page, "Kernel", "Shut Down Kernel")
    page.wait_for_function("document.querySelector('#jp-main-statusbar').innerText.includes('No Kernel')")
    page.close()


def widgets(opened):
    """(number of the cell, the box that it shows) of each widget."""
    return [(i, opened.shown.nth(i).locator(".widget-vbox")) for i, cell in enumerate(opened.cells) if "widget" in tags(cell)]


def photograph(box, path):
    box.evaluate("box => box.closest('.jp-Cell').scrollIntoView()")
    box.screenshot(path=path)


def test_every_cell_ran_and_none_shows_an_error(opened):
    found = []
    for i, cell in enumerate(opened.cells):
        if cell.cell_type == "code":
            place = opened.shown.nth(i)
            if not re.search(r"\d", place.locator(".jp-InputArea-prompt").text_content()):
                found.append(f"cell {i} did not run")
            if "raises-exception" not in tags(cell):
                found += [f"cell {i}: {text[:300]}" for text in place.locator("[data-mime-type='application/vnd.jupyter.error']").all_text_contents()]
    assert not found, "\n".join(found)
    assert "Error displaying widget" not in opened.page.locator(".jp-Notebook").text_content()
    assert sum("widget" in tags(cell) for cell in opened.cells) == opened.page.locator(".jp-OutputArea-output > .widget-vbox").count() > 0


def test_every_picture_has_a_text_that_stands_for_it(opened):
    """A widget's has a title. JupyterLab drops the alternative text that ``show`` gives a figure, so the finding must stand right above it."""
    above = opened.page.locator(".jp-OutputArea-child:has(.jp-RenderedImage)").evaluate_all("all => all.map(e => e.previousElementSibling?.innerText)")
    assert above and all(text and text.strip() for text in above), above
    drawn = opened.page.locator("img.widget-image").evaluate_all("all => all.filter(e => e.naturalWidth).map(e => e.title)")
    assert all(title.strip() for title in drawn), drawn


def test_nothing_is_wider_than_its_output(opened):
    wide = opened.page.locator(".jp-OutputArea, .jp-OutputArea-output").evaluate_all(
        "all => all.filter(e => e.scrollWidth > e.clientWidth).map(e => [e.scrollWidth, e.clientWidth, e.innerText.slice(0, 80)])"
    )
    assert not wide, wide


def focus(target):
    """Press Tab, beginning at the cell, until the target has the focus: nothing but the keyboard may be needed."""
    target.evaluate("e => e.closest('.jp-Cell').focus()")
    for _ in range(40):
        target.page.keyboard.press("Tab")
        if target.evaluate("e => e == document.activeElement"):
            return
    raise AssertionError(f"Tab does not reach {target}")


def drawn(box, draws):
    """What the widget shows (finding, text of the picture, its bytes) once it has drawn more than ``draws`` times; None if it does not begin to.

    It need not: two entries of a menu may stand for the same value.
    """
    from playwright.sync_api import TimeoutError

    try:
        box.page.wait_for_function("([box, draws]) => box.draws > draws", arg=[box.element_handle(), draws], timeout=1000 * BEGIN_SECONDS)
    except TimeoutError:
        return None
    box.page.wait_for_function(DRAWN, arg=box.element_handle(), timeout=1000 * DRAW_SECONDS)
    finding, title, pixels = state = box.evaluate(STATE)
    assert not box.locator(".widget-html-content b").count(), finding
    assert title == finding and pixels, f"the picture's text is {title!r}, the finding {finding!r}"
    return state


def press(box, target, keys):
    """Focus the target with Tab and press the keys; how often the widget had drawn before."""
    focus(target)
    draws = box.evaluate("box => box.draws")
    for key in keys:
        box.page.keyboard.press(key)
    box.page.wait_for_timeout(100)  # a menu closes a little later
    return draws


def changes(box, control, kind, button):
    """Whether the widget shows something else after some step of this control: tried one way until it stops, then the other."""
    value, moves = CONTROLS[kind]
    target = control.locator(kind).first
    before = box.evaluate(STATE)
    for keys in moves:
        old = None
        while old != (old := target.evaluate(f"e => {value}")):
            draws = press(box, target, keys)
            if target.evaluate(f"e => {value}") != old:
                if button:
                    draws = press(box, button, ["Space"])
                if drawn(box, draws) not in (None, before):
                    return True
    return False


def test_each_control_works_by_keyboard_and_changes_the_picture(opened):
    for i, box in widgets(opened):
        box.evaluate(WATCH)
        row = box.locator(".widget-hbox").first
        button = row.locator(":scope > button")
        button = button if button.count() else None
        if button:
            assert drawn(box, press(box, button, ["Space"])), f"cell {i}: the button does nothing"
        for control in row.locator(":scope > *:not(button, .widget-hprogress)").all():
            said = control.inner_text().split("\n")[0]
            kinds = [kind for kind in CONTROLS if control.locator(kind).count()]
            assert len(kinds) == 1, f"cell {i}: nothing here can operate {said!r} by keyboard"
            assert changes(box, control, kinds[0], button), f"cell {i}: nothing changes with {said!r}"


@pytest.fixture(params=["JupyterLab Light", "JupyterLab Dark"])
def theme(request, opened):
    choose(opened.page, "Settings", "Theme", request.param)
    opened.page.locator(f"body[data-jp-theme-name='{request.param}']").wait_for(state="attached")
    yield request.param
    if request.param != "JupyterLab Light":
        choose(opened.page, "Settings", "Theme", "JupyterLab Light")


def test_texts_and_pictures_are_readable_in_both_themes(opened, theme, screenshots):
    for i, box in widgets(opened):
        contrasts = box.evaluate(CONTRASTS)
        faint = [(text, round(ratio, 1)) for text, ratio in contrasts if ratio < 4.5]
        assert contrasts and not faint, f"cell {i}: {faint}"
        photograph(box, screenshots / f"{opened.name}-{i}-{theme.split()[1].lower()}.png")
    # A figure's words are black or grey, so its paper must be white whatever the page's colour.
    corners = opened.page.locator(".jp-OutputArea-output img").evaluate_all(f"all => all.filter(e => e.naturalWidth).map({CORNER})")
    assert corners and all(corner == [255] * 4 for corner in corners), corners
    opened.page.screenshot(path=screenshots / f"{opened.name}-{theme.split()[1].lower()}.png")


# ---- the pages of the site: from what the notebooks store, so that nothing need run --------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the pages, as ``tools/notebooks.py site`` writes them."""

    def stored(path):
        notebook = read(path)
        for _, cell in code_cells(notebook):
            if "widget" in tags(cell):  # only a running notebook has it
                cell.outputs.append(new_output("execute_result", {tool.WIDGET_VIEW: {"model_id": "gone"}, "text/plain": "VBox()"}, execution_count=1))
        return notebook, 1.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tool, "SITE", tmp_path_factory.mktemp("site"))
        patch.setattr(tool, "execute", stored)
        tool.site(None, None)
        return tool.SITE


@pytest.fixture
def offline(browser):
    """A page of a browser without a network, and the .errors of its scripts and of whatever it could not load."""
    page = browser.new_page(viewport=dict(width=1280, height=900))
    errors, blocked = [], set()

    def block(route):
        blocked.add(route.request.url)
        route.abort()

    page.route(re.compile("^(?!file:)"), block)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: message.type == "error" and message.location["url"] not in blocked and errors.append(message.text))
    yield SimpleNamespace(page=page, errors=errors)
    page.close()


def dead_links(page, site):
    """The links of the page to files or places that are not there."""
    dead = []
    for href in page.locator("a[href]").evaluate_all("all => all.map(e => e.getAttribute('href'))"):
        target, fragment = urldefrag(urljoin(page.url, href))
        if target.startswith("file:"):
            file = Path(unquote(urlparse(target).path))
            if site not in file.parents or not file.is_file() or (fragment and f'id="{unquote(fragment)}"' not in file.read_text(encoding="utf-8")):
                dead.append(href)
    return dead


def target(path):
    """The page of a notebook, from the index: those of a kept run lie in its folder."""
    return f"{path.stem}.html" if path in PATHS else f"{path.parent.name}/{path.stem}.html"


@pytest.mark.parametrize("path", PAGES, ids=target)
def test_a_page_works_without_a_network(path, site, offline, screenshots):
    page = offline.page
    page.goto((site / target(path)).as_uri())
    assert not dead_links(page, site)
    pictures = page.locator("img").evaluate_all("all => all.map(e => [e.alt, e.naturalWidth])")
    assert pictures and all(alt.strip() and alt != tool.NO_ALT and width for alt, width in pictures), pictures

    views = page.locator(".celltag_draw")
    stored = [cell for _, cell in code_cells(read(path)) if "draw" in tags(cell)]
    assert views.count() == len(stored) > 0
    for cell, view in zip(stored, views.all()):
        if any("image/png" in output.get("data", {}) for output in cell.outputs):
            assert view.locator("img").is_visible()
    notes = page.get_by_text("Interactive in JupyterLab").all()
    assert len(notes) == page.locator(".celltag_widget").count() > 0 and all(note.is_visible() for note in notes)

    folded = page.locator("details").all()
    for answer in folded:
        assert not answer.evaluate("e => e.open")
        height = answer.bounding_box()["height"]
        answer.locator("summary").click()
        assert answer.evaluate("e => e.open") and answer.bounding_box()["height"] > height
    assert folded
    page.screenshot(path=screenshots / f"{target(path).replace('/', '-')}.png", full_page=True)
    assert not offline.errors


def test_the_index_leads_to_every_page(site, offline):
    offline.page.goto((site / "index.html").as_uri())
    assert not dead_links(offline.page, site)
    assert offline.page.locator("a").count() == len(PAGES)
    for path in PAGES:
        offline.page.locator(f"a[href='{target(path)}']").click()
        assert offline.page.locator("h1").first.is_visible()
        offline.page.go_back()
    assert not offline.errors
