"""The interactive page: what is in the file, and what it does in a browser, by hand and by key."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from schedules import Costs, ScheduleError, build, from_orders, simulate
from schedules.tools.page import MOST_ACTIONS, save_page
from schedules.tools.palette import DARK, LIGHT

ONE = simulate(build("1f1b", num_ranks=2, num_microbatches=4), Costs(1, 1, 1, 0.5))
CHUNKS = build("zb_v", num_ranks=2, num_microbatches=4, num_stages=4)
HOSTILE = (
    """</script><img src=x onerror="document.title='owned'"><script>alert(1)</script>""",
    "<!--<script>\u2028\u2029&lt;{{data}}'\"`${alert(1)}]]>",
)


class Elements(HTMLParser):
    """Collects (tag, attributes, text up to the next tag)."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict, str]] = []
        self.closed = 0  # how many elements had begun when one last ended
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), ""))

    def handle_endtag(self, tag):
        self.closed = len(self.found)

    def handle_data(self, data):
        if len(self.found) > self.closed:
            tag, attrs, text = self.found[-1]
            self.found[-1] = (tag, attrs, text + data)

    def all(self, tag):
        return [(attrs, text) for name, attrs, text in self.found if name == tag]


def saved(tmp_path, drawn, **options):
    path = tmp_path / "page.html"
    save_page(drawn, path, **options)
    return path


def elements(tmp_path, drawn, **options) -> Elements:
    return Elements(saved(tmp_path, drawn, **options).read_text(encoding="utf-8"))


def test_the_policy_permits_what_is_in_the_file_and_nothing_else(tmp_path):
    page = elements(tmp_path, ONE)
    (policy,) = [a["content"] for a, _ in page.all("meta") if "http-equiv" in a]
    (style,) = [text for _, text in page.all("style")]
    data, script = [text for _, text in page.all("script")]
    digests = [
        base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        for text in (script, style)
    ]
    assert policy == (
        f"default-src 'none'; script-src 'sha256-{digests[0]}'; style-src 'sha256-{digests[1]}'; "
        "base-uri 'none'; form-action 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )
    assert json.loads(data)["entries"][0]["label"] == "1f1b  2 ranks, 2 stages, 4 microbatches"


def test_it_points_nowhere(tmp_path):
    page = elements(tmp_path, [ONE, CHUNKS])
    for tag, attrs, _ in page.found:
        assert not {"src", "href", "style", "action", "srcset"} & set(attrs), tag
        assert not [name for name in attrs if name.startswith("on")], tag
    assert "://" not in saved(tmp_path, ONE).read_text(encoding="utf-8")


def test_the_same_every_time(tmp_path):
    before = saved(tmp_path, [ONE, CHUNKS]).read_bytes()
    assert saved(tmp_path, [ONE, CHUNKS]).read_bytes() == before
    assert b"\r" not in before


def test_hostile_names_end_no_element(tmp_path):
    schedules = [from_orders([["0F0", "0B0"]], name=name) for name in HOSTILE]
    page = elements(tmp_path, schedules, title=HOSTILE[0])
    assert [text for _, text in page.all("title")] == [f"{HOSTILE[0]}"]
    assert [tag for tag, _, _ in page.found if tag in ("script", "img")] == ["script"] * 2
    data = page.all("script")[0][1]
    assert not set("<>&\u2028\u2029") & set(data)
    assert [entry["label"] for entry in json.loads(data)["entries"]] == [
        f"{HOSTILE[0]}  1 ranks, 1 stages, 1 microbatches",
        f"{HOSTILE[1]}  1 ranks, 1 stages, 1 microbatches".replace("\u2028", r"\u2028").replace(
            "\u2029", r"\u2029"
        ),
    ]


def entries(tmp_path, drawn) -> list:
    return json.loads(elements(tmp_path, drawn).all("script")[0][1])["entries"]


def test_clocks_that_are_missing_are_simulated(tmp_path):
    lockstep = simulate(ONE.schedule, ONE.costs, "lockstep", pattern="paired")
    (entry,) = entries(tmp_path, [ONE, ONE, lockstep])
    assert [(r["label"], r["makespan"]) for r in entry["reports"]] == [
        ("event", ONE.makespan),
        ("lockstep, paired ticks", lockstep.makespan),
    ]
    (entry,) = entries(tmp_path, simulate(ONE.schedule, Costs(1, 1, 1, 0.5, b=(1.5, 1.75))))
    assert entry["note"] == "Costs: F 1, I 1, W 1, B 1.5 to 1.75, message 0.5"
    (entry,) = entries(tmp_path, CHUNKS)
    assert [r["clock"] for r in entry["reports"]] == ["event", "lockstep"]
    assert entry["note"] == "Costs: F 1, I 1, W 1, message 0"


def test_other_costs_are_another_timeline_and_a_measured_one_stays_alone(tmp_path):
    costs = Costs((1, 2), 1, 1, optimizer=3, pair=1.5)
    actions = [action for order in ONE.schedule.orders for action in order]
    durations = dict.fromkeys(actions, 2.5)
    measured = simulate(ONE.schedule, Costs(9), "measured", durations=durations)
    found = entries(tmp_path, [ONE, simulate(ONE.schedule, costs), measured])
    assert [entry["label"] for entry in found] == [
        f"{n}. 1f1b  2 ranks, 2 stages, 4 microbatches" for n in (1, 2, 3)
    ]
    assert found[1]["note"] == (
        "Costs: F 1 to 2, I 1, W 1, message 0, overlapped pair 1.5, "
        "optimizer step 3 after the makespan"
    )
    assert [r["clock"] for r in found[2]["reports"]] == ["measured"]


def test_titles(tmp_path):
    assert elements(tmp_path, [ONE, CHUNKS, ONE]).all("h1")[0][1] == "Timeline of 1f1b and zb_v"
    assert elements(tmp_path, ONE, title="A < B & C").all("h1")[0][1] == "A < B & C"


def test_refusals(tmp_path):
    def refusal(drawn, name="page.html"):
        with pytest.raises(ScheduleError) as caught:
            save_page(drawn, tmp_path / name)
        assert not (tmp_path / name).exists()
        return str(caught.value)

    assert refusal([]) == (
        "drawn is empty; give what simulate() returned, or schedules, one or several"
    )
    assert refusal([ONE, "1f1b"]) == (
        "drawn holds '1f1b', which is neither a report nor a schedule; give what simulate() "
        "returned, or schedules"
    )
    assert refusal(ONE, "a.svg") == (
        f"path={str(tmp_path / 'a.svg')!r} ends in '.svg'; a page is written as .html, so choose "
        f"that suffix"
    )
    schedule = build("gpipe", num_ranks=2, num_microbatches=25_000)
    assert refusal([schedule] * 11) == (
        f"drawn has 2200000 actions (two clocks for each of 11), a page holds at most "
        f"{MOST_ACTIONS}; give fewer schedules, or build them with fewer microbatches: the steady "
        f"phase repeats itself"
    )


# In the browser. ---------------------------------------------------------------------------------

FLAGS = """
    --headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-sync
    --disable-background-networking --disable-component-update --disable-dev-shm-usage
    --force-device-scale-factor=1 --hide-scrollbars
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed")
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    binary = next(filter(None, map(shutil.which, names)), None)
    service = shutil.which("chromedriver")
    if binary is None or service is None:
        pytest.skip(
            "no browser: neither the page nor its keys are tested without chromium and "
            "chromedriver on the PATH (Debian: chromium, chromium-driver)"
        )
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in [*FLAGS.split(), f"--user-data-dir={tmp_path_factory.mktemp('profile')}"]:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    service = webdriver.ChromeService(service)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_window_size(1400, 1000)
    driver.get("about:blank")  # the browser's own first page is no page of ours
    yield driver
    driver.quit()


class Page:
    """A page in the browser, and what a reader does with it."""

    def __init__(self, driver, path) -> None:
        self.driver = driver
        driver.get(path.as_uri())
        self.settle()

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def settle(self):
        """Wait until two frames are drawn."""
        self.driver.execute_async_script(
            "const done = arguments[0]; requestAnimationFrame(() => requestAnimationFrame(done))"
        )

    def all(self, css):
        return self.driver.find_elements("css selector", css)

    def click(self, css, n=0):
        self.all(css)[n].click()
        self.settle()

    def switch(self, name):
        self.click(f"label:has(#{name})")

    def texts(self, css):
        return [element.text for element in self.all(css) if element.is_displayed()]

    def view(self):
        data = self.run("return {...document.getElementById('range').dataset}")
        return float(data["start"]), float(data["end"])

    def where(self, time, rank, panel=0, down=0.5):
        """A timeline, and a point in it from its corner: a time, and a share of a row's height."""
        canvas = self.all(".timeline")[panel]
        box = {k: float(v) for k, v in self.run("return {...arguments[0].dataset}", canvas).items()}
        start, end = self.view()
        x = box["left"] + (time - start) / (end - start) * box["plot"]
        return canvas, x, box["top"] + rank * box["pitch"] + down * box["row"], box["width"]

    def place(self, time, rank, panel=0, down=0.5):
        """Place of an action from the middle of its canvas, as the driver has it."""
        canvas, x, y, _ = self.where(time, rank, panel, down)
        size = canvas.size
        return canvas, round(x - size["width"] / 2), round(y - size["height"] / 2)

    def chain(self):
        from selenium.webdriver import ActionChains

        return ActionChains(self.driver, duration=0)

    def point(self, time, rank, panel=0, down=0.5):
        """The tooltip's text, line by line."""
        self.run("arguments[0].scrollIntoView({block: 'center'})", self.all(".timeline")[panel])
        self.settle()
        canvas, x, y = self.place(time, rank, panel, down)
        self.chain().move_to_element_with_offset(canvas, x, y).perform()
        return self.tip()

    def tip(self):
        return self.run(
            "const tip = document.getElementById('tip');"
            "return tip.hidden ? null : [...tip.children].map((line) => line.innerText)"
        )

    def wheel(self, time, rank, **event):
        canvas, x, y = self.place(time, rank)
        self.run(
            "const [canvas, x, y, event] = arguments, box = canvas.getBoundingClientRect();"
            "canvas.dispatchEvent(new WheelEvent('wheel', {bubbles: true, cancelable: true,"
            "clientX: box.left + box.width / 2 + x, clientY: box.top + box.height / 2 + y,"
            "...event}))",
            canvas,
            x,
            y,
            event,
        )
        self.settle()

    def press(self, *keys, panel=0):
        from selenium.webdriver.common.keys import Keys

        self.run("arguments[0].focus()", self.all(".timeline")[panel])
        chain = self.chain()
        for key in keys:
            *held, last = (
                (getattr(Keys, part, part) for part in key.split("-")) if len(key) > 1 else [key]
            )
            for one in held:
                chain.key_down(one)
            chain.send_keys(last)
            for one in held:
                chain.key_up(one)
        chain.perform()
        self.settle()

    def colour(self, time, rank, panel=0, down=0.5):
        """#RRGGBB of a pixel of a timeline."""
        canvas, x, y, width = self.where(time, rank, panel, down)
        return self.run(
            "const [canvas, x, y, width] = arguments, scale = canvas.width / width;"
            "const copy = new OffscreenCanvas(1, 1).getContext('2d', {willReadFrequently: true});"
            "copy.drawImage(canvas, -Math.round(x * scale), -Math.round(y * scale));"
            "const bytes = [...copy.getImageData(0, 0, 1, 1).data.slice(0, 3)];"
            "return '#' + bytes.map((v) => v.toString(16).padStart(2, '0')).join('')",
            canvas,
            x,
            y,
            width,
        ).upper()

    def emulate(self, **features):
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": k.replace("_", "-"), "value": v} for k, v in features.items()]},
        )
        self.settle()


@pytest.fixture
def open_page(driver, tmp_path):
    """Opens pages; afterwards nothing may have been complained of, or asked of the network."""
    driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]},
    )
    for log in ("browser", "performance"):
        driver.get_log(log)

    def open_it(drawn, **options):
        return Page(driver, saved(tmp_path, drawn, **options))

    yield open_it
    assert [entry["message"] for entry in driver.get_log("browser")] == []
    messages = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
    sent = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    assert {params["request"]["url"].split(":")[0] for params in sent} <= {"file", "data"}


def test_a_span_without_bubbles_does_not_hide_that_the_step_waits(open_page):
    report = simulate(build("zb_v", num_ranks=4, num_microbatches=8, num_stages=8))
    page = open_page(report)
    shown = dict(zip(page.texts(".figures dt"), page.texts(".figures dd"), strict=True))
    assert shown["Idle in the longest span"] == "0.0%"
    assert shown["Bubble of the step"] == f"{100 * report.step_bubble_rate:.1f}%" != "0.0%"


def test_every_action_can_be_pointed_at(open_page):
    page = open_page(ONE)
    for rank, order in enumerate(ONE.schedule.orders):
        for n in (0, 3, len(order) - 1):
            start, end = ONE.starts[rank][n], ONE.ends[rank][n]
            action = order[n]
            assert page.point((start + end) / 2, rank) == [
                f"{action} {'forward' if action.kind == 'F' else 'backward'}",
                f"rank {rank} · stage {action.stage} · microbatch {action.microbatch}",
                f"{start:g} – {end:g}, takes {end - start:g}",
            ]


def test_every_wait_says_why_and_for_whom(open_page):
    page = open_page(ONE)
    shown = 0
    for rank, row in enumerate(ONE.explain().waits):
        for wait in row:
            lines = page.point((wait.start + wait.end) / 2, rank)
            assert lines[0] == f"{wait.cause} idle"
            assert lines[2] == f"{wait.start:g} – {wait.end:g}, takes {wait.end - wait.start:g}"
            rest = []
            if wait.behind is not None:
                there = ONE.schedule.placement[wait.behind.stage]
                rest = [f"waits for {wait.behind} on rank {there}"]
            if wait.position is not None:
                rest.append(f"before {ONE.schedule.orders[rank][wait.position]}")
            assert lines[3:] == rest
            shown += 1
    assert shown > 6
    assert {wait.cause for row in ONE.explain().waits for wait in row} >= {"fill", "communication"}


@pytest.mark.slow
def test_what_ranks_share_is_a_box_of_all_of_them(open_page):
    report = simulate(ONE.schedule, Costs(1, 1, 1, 0.5, head=2), shared=("head",))
    page = open_page(report)
    assert len(report.common) == 4
    for rank, (start, end) in itertools.product((0, 1), report.common):
        middle = (start + end) / 2
        assert page.colour(middle, rank) == LIGHT.shared
        lines = page.point(middle, rank)
        assert lines[:2] == ["shared by all ranks", f"rank {rank}"]
        assert lines[2] == f"{start:g} – {end:g}, takes {end - start:g}"


def test_pointing_beside_the_rows_tells_nothing(open_page):
    page = open_page(ONE)
    assert page.point(1, 0) is not None
    assert page.point(1, 1, down=1.6) is None
    assert page.point(1, 0) is not None
    page.chain().move_to_element(page.all("h1")[0]).perform()
    assert page.tip() is None


@pytest.mark.slow
def test_zoom_by_button_wheel_and_key(open_page):
    page = open_page(ONE)
    whole = ONE.makespan
    page.click("#in")
    start, end = page.view()
    assert (end - start, start + end) == (pytest.approx(whole / 1.6), pytest.approx(whole))
    assert page.texts("#range")[0].endswith(f" of {whole:g}")
    page.click("#out")
    assert page.view() == (0, whole)
    page.wheel(5, 0, deltaY=-400, ctrlKey=True)
    start, end = page.view()
    assert end - start == pytest.approx(whole / 2.718281828)
    assert (5 - start) / (end - start) == pytest.approx(5 / whole, abs=0.01)  # 5 stays in place
    page.press("0")
    assert page.view() == (0, whole)
    page.press("+", "+", "-")
    start, end = page.view()
    assert end - start == pytest.approx(whole / 1.6)
    page.click("#fit")
    assert page.view() == (0, whole)
    canvas, x, y = page.place(whole / 4, 0)
    page.chain().move_to_element_with_offset(canvas, x, y).double_click().perform()
    page.settle()
    start, end = page.view()
    assert end - start == pytest.approx(whole / 2)
    page.wheel(start, 0, deltaY=1e6, ctrlKey=True)
    assert page.view() == (0, whole)
    page.wheel(3, 0, deltaY=-1e6, ctrlKey=True)
    start, end = page.view()
    assert end - start == pytest.approx(whole * 1e-6)


def test_pan_by_drag_wheel_and_key(open_page):
    page = open_page(ONE)
    page.click("#in")
    start, end = page.view()
    canvas, x, y = page.place((start + end) / 2, 0)
    chain = page.chain().move_to_element_with_offset(canvas, x, y).click_and_hold()
    chain.move_by_offset(-60, 0).release().perform()
    page.settle()
    plot = float(canvas.get_attribute("data-plot"))
    moved = page.view()[0]
    assert moved - start == pytest.approx(60 / plot * (end - start))
    page.press("ARROW_LEFT")
    assert page.view()[0] == pytest.approx(moved - 0.15 * (end - start))
    page.wheel(page.view()[0] + 1, 0, deltaX=40)
    assert page.view()[0] > moved - 0.15 * (end - start)
    page.wheel(page.view()[0] + 1, 0, deltaY=-1e6, shiftKey=True)
    assert page.view()[0] == 0
    before = page.view()
    page.wheel(1, 0, deltaY=100)  # the page scrolls, the view stays
    assert page.view() == before
    page.press(*["ARROW_RIGHT"] * 9)
    assert page.view()[1] == ONE.makespan
    overview = page.all("#overview")[0]
    page.chain().move_to_element(overview).click().perform()
    page.settle()
    assert sum(page.view()) / 2 == pytest.approx(ONE.makespan / 2, rel=0.05)


def test_keys_go_through_actions_and_waits_and_are_read_aloud(open_page):
    page = open_page(ONE)
    heads = []
    for _ in range(5):
        page.press("SHIFT-ARROW_RIGHT")
        heads.append(page.texts("#tip strong")[0])
    order = ONE.schedule.orders[0]
    assert heads == [str(order[0]), str(order[1]), "fill", "communication", str(order[2])]
    page.press("SHIFT-ARROW_LEFT", "SHIFT-ARROW_LEFT")
    assert page.run("return document.getElementById('said').textContent") == (
        "fill, idle, rank 0: the pipeline is filling: no backward pass has begun on this rank, "
        "2 – 4.5, takes 2.5, waits for 1B0 on rank 1, before 0B0"
    )
    page.press("ARROW_DOWN")
    assert page.tip()[0] == "1B0 backward"
    page.press("ENTER")
    start, end = page.view()
    assert (start, end) != (0, ONE.makespan)
    assert start < 2.5 < 4.5 < end
    page.press("ESCAPE")
    assert page.tip() is None


def test_the_clock_can_be_switched(open_page):
    page = open_page(ONE)
    lockstep = simulate(ONE.schedule, ONE.costs, "lockstep")
    assert lockstep.makespan != ONE.makespan
    page.click(".panel .segments label", 1)
    assert page.texts(".figures dd")[0] == f"{lockstep.makespan:g}"
    assert page.view() == (0, lockstep.makespan)
    assert "lockstep" in page.texts("#shares")[0] or "lockstep" in page.texts("#tables")[0]
    page.press("TAB", panel=0)  # the radio buttons are keys' business too
    page.run("document.querySelectorAll('.panel input')[1].focus()")
    page.chain().send_keys("\ue012").perform()
    page.settle()
    assert page.texts(".figures dd")[0] == f"{ONE.makespan:g}"


def test_one_schedule_is_compared_under_two_clocks(open_page):
    page = open_page(ONE)
    lockstep = simulate(ONE.schedule, ONE.costs, "lockstep")
    page.switch("compare")
    makespans = page.texts(".figures dd")[::4]
    change = 100 * (lockstep.makespan / ONE.makespan - 1)
    assert makespans == [f"{ONE.makespan:g}", f"{lockstep.makespan:g} +{change:.1f}% against A"]
    assert page.view() == (0, lockstep.makespan)
    page.switch("compare")
    assert page.texts(".figures dd")[::4] == [f"{ONE.makespan:g}"]
    assert page.view() == (0, ONE.makespan)


def test_two_schedules_share_a_time_axis(open_page):
    other = simulate(CHUNKS, Costs(0.5, 0.5, 0.5, 0.5))
    page = open_page([ONE, other])
    assert [panel.is_displayed() for panel in page.all(".panel")] == [True, True]
    assert page.view() == (0, max(ONE.makespan, other.makespan))
    n = 4
    action, start, end = CHUNKS.orders[1][n], other.starts[1][n], other.ends[1][n]
    lines = page.point((start + end) / 2, 1, panel=1)
    chunk = CHUNKS.chunk_of[action.stage]
    assert lines[0].startswith(f"{action} ")
    assert f"stage {action.stage} · chunk {chunk} · " in lines[1]
    page.click("#in")
    boxes = [canvas.get_attribute("data-left") for canvas in page.all(".timeline")]
    assert boxes[0] == boxes[1]
    rows = [row.split(" ") for row in page.texts("#shares tbody tr")]
    work = [sum(ONE.work), sum(other.work)]
    shares = [1 - ONE.step_bubble_rate, 1 - other.step_bubble_rate]
    assert rows[0] == [
        "work",
        f"{100 * shares[0]:.1f}%",
        f"{work[0]:g}",
        f"{100 * shares[1]:.1f}%",
        f"{work[1]:g}",
        f"{work[1] - work[0]:g}".replace("-", "−"),
    ]
    page.run(
        "arguments[0].value = 0; arguments[0].dispatchEvent(new Event('change'))",
        page.all("select")[1],
    )
    page.settle()
    assert page.texts(".figures dd")[4] == f"{ONE.makespan:g}"


def test_the_tables_hold_the_explanation(open_page):
    page = open_page(ONE)
    parts, whole = ONE.explain().parts, ONE.makespan
    heads = page.texts("#tables thead th")
    for rank, row in enumerate(page.all("#tables tbody tr")):
        cells = dict(
            zip(
                heads[1:],
                [cell.text for cell in row.find_elements("css selector", "td")],
                strict=True,
            )
        )
        assert cells["peak"] == str(ONE.peak_activations[rank])
        assert cells["work"] == f"{100 * ONE.work[rank] / whole:.1f}%"
        for cause, time in parts[rank].items():
            wanted = f"{100 * time / whole:.1f}%" if time else "–"
            assert cells.get(cause, "–") == wanted


def test_memory_under_every_row(open_page):
    page = open_page(ONE)
    canvas = page.all(".timeline")[0]
    height = canvas.size["height"]
    pixel = page.colour(4, 0, down=1.5)
    page.switch("memory")
    assert canvas.size["height"] > height + 30
    assert page.colour(4, 0, down=1.7) != pixel
    assert page.point(0.5, 0, down=1.5)[0] == "1 held stage inputs on rank 0"
    assert page.point(1.5, 0, down=1.5) == [
        "2 held stage inputs on rank 0",
        page.tip()[1],
    ]
    assert re.fullmatch(r"at 1\.[45]\d*; its peak is 2", page.tip()[1])
    page.switch("memory")
    assert canvas.size["height"] == height


def test_colours_follow_the_scheme_and_the_printer(open_page):
    page = open_page(ONE)
    time = ONE.starts[0][2] + 0.2
    assert page.colour(time, 0) == LIGHT.fill["B"]
    assert page.colour(0.2, 0, down=0.2) == LIGHT.fill["F"]
    page.emulate(prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    assert page.colour(time, 0) == DARK.fill["B"]
    page.run("dispatchEvent(new Event('beforeprint'))")
    assert page.colour(time, 0) == LIGHT.fill["B"]
    page.run("dispatchEvent(new Event('afterprint'))")
    assert page.colour(time, 0) == DARK.fill["B"]
    pdf = page.driver.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})
    assert base64.b64decode(pdf["data"]).startswith(b"%PDF")
    assert page.run("return document.documentElement.className") == "dark"


HOST = """<!doctype html><html><body data-told="">
<iframe src="page.html#embedded" width="700" height="900"></iframe>
<script>
addEventListener("message", (event) => { document.body.dataset.told = event.data.height; });
</script></body></html>"""


def test_in_a_frame_it_is_the_timelines_alone_in_the_theme_around_it(driver, tmp_path):
    """The page around it is told how high the frame has to be, and says which theme it has."""
    drawn = saved(tmp_path, ONE)
    drawn.rename(tmp_path / "page.html")
    (tmp_path / "host.html").write_text(HOST, encoding="utf-8")
    page = Page(driver, tmp_path / "host.html")
    driver.switch_to.frame(0)
    try:
        page.emulate(prefers_color_scheme="light", prefers_reduced_motion="reduce")
        assert page.run("return document.documentElement.className") == "embedded"
        hidden = "header, main > section, main > details"
        assert not any(element.is_displayed() for element in page.all(hidden))
        assert page.all(".timeline")[0].is_displayed()
        height = page.run("return document.body.getBoundingClientRect().height")
        for dark, palette in ((True, DARK), (False, LIGHT)):
            driver.switch_to.parent_frame()
            page.run("frames[0].postMessage({dark: arguments[0]}, '*')", dark)
            driver.switch_to.frame(0)
            page.settle()
            assert page.colour(ONE.starts[0][2] + 0.2, 0) == palette.fill["B"]
    finally:
        driver.switch_to.default_content()
    assert 0 < float(page.run("return document.body.dataset.told")) - height <= 3


def test_opened_alone_the_same_address_is_the_whole_page(open_page, driver):
    page = open_page(ONE)
    driver.get(driver.current_url + "#embedded")
    driver.refresh()
    page.settle()
    assert page.run("return document.documentElement.className") == ""
    assert page.all("header")[0].is_displayed()


def test_hostile_names_stay_text(open_page):
    schedules = [from_orders([["0F0", "0B0"]], name=name) for name in HOSTILE]
    page = open_page(schedules, title=HOSTILE[0])
    assert page.run("return [document.title, document.images.length, document.scripts.length]") == [
        HOSTILE[0],
        0,
        2,
    ]
    labels = page.run(
        "return [...document.querySelector('select').options].map((o) => o.textContent)"
    )
    assert labels[0] == f"{HOSTILE[0]}  1 ranks, 1 stages, 1 microbatches"
    assert HOSTILE[0] in page.run("return document.getElementById('tables').textContent")


def test_the_policy_holds(open_page, driver):
    page = open_page(ONE)
    told = page.driver.execute_async_script(
        """
        const done = arguments[0], told = [];
        addEventListener("securitypolicyviolation", (e) => told.push(e.effectiveDirective));
        try { document.body.innerHTML = "<b>markup</b>"; } catch (e) { told.push(e.name); }
        const script = document.createElement("script");
        try { script.textContent = "window.ran = true"; document.body.append(script); }
        catch (e) { told.push(e.name); }
        const image = new Image();
        image.src = "data:image/gif;base64,R0lGODlhAQABAAAAACw=";
        const end = () => setTimeout(() => done([told, window.ran ?? null]), 50);
        fetch("data:text/plain,x").then(end, end);
        """
    )
    assert told[1] is None
    assert {"TypeError", "img-src", "connect-src"} <= set(told[0])
    driver.get_log("browser")  # it complained, as it should


@pytest.mark.few
@pytest.mark.parametrize("width", [320, 420, 1600])
def test_nothing_sticks_out(open_page, width):
    page = open_page([ONE, CHUNKS], title="A rather long title " * 4)
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        page.settle()
        assert page.run("return document.documentElement.scrollWidth") <= width
        assert page.run("return document.querySelector('.timeline').clientWidth") <= width
        assert page.point(0.5, 0)[0].startswith("0F0")
    finally:
        page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_narrow_page_opens_where_its_boxes_can_be_read(driver, open_page):
    """At 420 px the step of 8 microbatches is whole, of 32 only the first part (issue 71)."""
    metrics = {"width": 420, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    try:
        short = simulate(build("zb_h1", num_ranks=4, num_microbatches=8))
        assert open_page(short).view() == (0, short.makespan)
        long = simulate(build("1f1b", num_ranks=4, num_microbatches=32))
        page = open_page(long)
        start, end = page.view()
        canvas = page.run("return {...document.querySelector('.timeline').dataset}")
        assert start == 0
        assert float(canvas["plot"]) / end > 6  # pixels of an F
        page.click("#fit")
        assert page.view() == (0, long.makespan)
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_a_step_that_ran_opens_first_and_has_its_unit(open_page):
    actions = [action for order in ONE.schedule.orders for action in order]
    ran = simulate(ONE.schedule, Costs(2e-3), "measured", durations=dict.fromkeys(actions, 2e-3))
    ran = dataclasses.replace(ran, unit="s")
    page = open_page([simulate(ran.schedule, ran.costs, "lockstep"), ran])
    assert [text.split(",")[0] for text in page.texts(".segments span")] == ["measured", "lockstep"]
    assert page.texts(".segments label:has(:checked)") == ["measured"]
    assert page.texts(".figures dd")[0] == f"{1e3 * ran.makespan:g} ms"
    assert page.texts("#range") == [f"0 ms – {1e3 * ran.makespan:g} ms"]
    assert page.texts(".panel .note") == ["Costs in s: F 0.002, I 1, W 1, message 0"]
    assert page.point(1e-3, 0)[2] == "0 ms – 2 ms, takes 2 ms"


def test_one_rank_and_no_time(open_page):
    page = open_page(build("gpipe", num_ranks=1, num_microbatches=2))
    assert page.texts(".figures dd")[0] == "6"
    assert page.point(2.5, 0)[0] == "0B0 backward"
    nothing = simulate(build("1f1b", num_ranks=2, num_microbatches=2), Costs(0, 0, 0))
    page = open_page(nothing)
    assert page.texts(".figures dd") == ["0", "0.0%", "0.0%", "2 rank 0"]
    assert page.view() == (0, 1)


def test_pairs_name_each_other(open_page):
    schedule = build("dualpipe_v", num_ranks=2, num_microbatches=4, num_stages=4)
    report = simulate(schedule, Costs(1, 1, 1, pair=2.5))
    page = open_page(report)
    position = schedule.pairs[0][0]
    for half in (0, 1):
        start, end = (times[0][position + half] for times in (report.starts, report.ends))
        other = schedule.orders[0][position + 1 - half]
        assert page.point((start + end) / 2, 0)[-1] == f"overlaps with {other}"
    assert "overlapped pair" in page.texts("#legend")[0]


@pytest.mark.slow
def test_a_long_schedule_is_drawn_in_columns_and_boxes(open_page):
    report = simulate(build("gpipe", num_ranks=8, num_microbatches=3000))
    page = open_page(report)
    assert page.colour(report.makespan * 0.2, 3) == LIGHT.fill["F"]
    assert page.colour(report.makespan * 0.7, 3) == LIGHT.fill["B"]
    order = report.schedule.orders[3]
    n = 2000
    middle = (report.starts[3][n] + report.ends[3][n]) / 2
    for _ in range(3):
        page.wheel(middle, 3, deltaY=-1000, ctrlKey=True)
    assert page.view()[1] - page.view()[0] < 12
    assert page.point(middle, 3)[0] == f"{order[n]} forward"
    assert page.colour(middle, 3, down=0.1) == LIGHT.fill["F"]
