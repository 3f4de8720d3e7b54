"""What somebody without a mouse needs of a page: everything is reached by Tab, in the order of the page, and shows that it is."""

from __future__ import annotations

import re

from playwright.sync_api import Page, expect

# Real presses of Tab on each page; all its controls are looked at besides.
STEPS = 4
MOST_STEPS = 150

# Each control that can be seen takes the focus and shows it, none stands in another order than the page, and what is pressed by a
# mouse is a control at all.
_CONTROLS = """() => {
    const wrong = [];
    const tell = (control, what) => wrong.push(`${what}: ${control.outerHTML.slice(0, 140)}`);
    const isSeen = (control) => control.checkVisibility({ visibilityProperty: true });
    const pressed = "[data-opens], [data-closes], [data-folds], [data-graph-do], [data-key], [hx-post]:not(form, [hx-trigger])";
    for (const each of document.querySelectorAll(pressed)) {
        if (isSeen(each) && !each.matches("a[href], button, input, select, summary")) tell(each, "only for a mouse");
    }
    const inside = "a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex]:not([tabindex='-1'])";
    for (const each of document.querySelectorAll(inside)) {
        if (!isSeen(each) || each.disabled) continue;
        if (each.tabIndex < 0) tell(each, "cannot be reached");
        if (each.tabIndex > 0) tell(each, "jumps the line");
        each.focus({ focusVisible: true, preventScroll: true });
        if (document.activeElement !== each) { tell(each, "takes no focus"); continue; }
        const { outlineStyle, outlineWidth } = getComputedStyle(each);
        const border = each.matches(".graph-node") && getComputedStyle(each.querySelector("rect:last-of-type")).strokeWidth;
        const width = border || (outlineStyle === "none" ? 0 : outlineWidth);
        if (!(parseFloat(width) >= 2)) tell(each, "does not show its focus");
    }
    document.activeElement?.blur();
    return wrong;
}"""
_WATCH = """() => {
    window.held = [];
    document.addEventListener("focusin", (event) => window.held.push(event.target));
}"""
# Where the focus went, one after the other: always onward in the page, until it begins again at its top. A part that was read anew
# meanwhile has given its focus to its successor: what is no longer in the page has no place there.
_BACKWARD = """() => window.held.flatMap((each, place) => {
    const before = each.matches(".skip") ? null : window.held[place - 1];
    const areHere = before?.isConnected && each.isConnected;
    const isOnward = !areHere || before.compareDocumentPosition(each) & Node.DOCUMENT_POSITION_FOLLOWING;
    return isOnward ? [] : [`goes back to ${each.outerHTML.slice(0, 140)}`];
})"""
_LEAVES = """() => {
    const controls = [...document.querySelectorAll("main :is(a[href], button, input, select, textarea, summary)")];
    window.last = controls.filter((each) => each.checkVisibility({ visibilityProperty: true }) && !each.disabled).at(-1);
    window.last?.focus();
}"""


def problems(page: Page) -> list[str]:
    """Of a page that is open; afterwards nothing has the focus."""
    wrong: list[str] = page.evaluate(_CONTROLS)
    page.evaluate(
        "scrollTo(0, 0); document.body.tabIndex = -1; document.body.focus(); document.body.removeAttribute('tabindex')"
    )
    page.keyboard.press("Tab")
    if page.evaluate("document.activeElement.className") != "skip":
        wrong.append("the first Tab does not lead to the link past the menu")
    page.keyboard.press("Enter")
    if page.evaluate("document.activeElement.id") != "main":
        wrong.append("the link past the menu does not lead to the content")
    page.evaluate(_WATCH)
    for _ in range(STEPS):
        page.keyboard.press("Tab")
    wrong += page.evaluate(_BACKWARD)
    if not page.evaluate("window.held.length"):
        wrong.append("nothing in its content takes the focus by Tab")
    page.evaluate(_LEAVES)
    page.keyboard.press("Tab")
    if page.evaluate("window.last && document.activeElement === window.last"):
        wrong.append("the focus cannot leave its last control")
    page.evaluate("document.activeElement?.blur()")
    return wrong


def dialog_problems(page: Page, seen: set[tuple[str, int]]) -> list[str]:
    """Each dialog takes the focus, keeps it, and gives it back to what opened it. Of those that differ by a number, the first; and
    none that was `seen` on another page, with as many controls."""
    wrong: list[str] = []
    names: list[str] = page.locator("main [data-opens]:visible").evaluate_all(
        "all => all.map((each) => each.dataset.opens)"
    )
    for kind, name in {re.sub(r"\d", "", each): each for each in reversed(names)}.items():
        opener, box = page.locator(f"main [data-opens={name}]"), page.locator(f"dialog#{name}")
        controls = box.locator("a[href], button, input:not([type=hidden]), select, textarea")
        if (kind, controls.count()) in seen:
            continue
        seen.add((kind, controls.count()))
        opener.focus()
        page.keyboard.press("Enter")
        expect(box).to_be_visible()
        if not page.evaluate("document.activeElement.closest('dialog[open]') !== null"):
            wrong.append(f"{name}: does not take the focus")
        page.evaluate(_WATCH)
        for _ in range(controls.count() + 2):
            page.keyboard.press("Tab")
        # Between its last control and its first one the focus is the browser's own.
        if page.evaluate("window.held.some((each) => !each.closest('dialog[open]') && each !== document.body)"):
            wrong.append(f"{name}: lets the focus out")
        page.keyboard.press("Escape")
        expect(box).to_be_hidden()
        if not opener.evaluate("opener => document.activeElement === opener"):
            wrong.append(f"{name}: does not give the focus back")
    return wrong


def tab_to(page: Page, name: str, role: str | None = None) -> None:
    """By Tab alone, as somebody who listens for that name."""
    seen = []
    for _ in range(MOST_STEPS):
        page.keyboard.press("Tab")
        held = page.evaluate(
            "(() => { const e = document.activeElement; return [e.getAttribute('role') ?? e.tagName.toLowerCase(),"
            " (e.getAttribute('aria-label') ?? e.labels?.[0]?.innerText ?? e.innerText ?? '').trim()]; })()"
        )
        if held[1].startswith(name) and role in (None, held[0]):
            return
        seen.append(held[1][:30])
    raise AssertionError(f"Tab never reached {name!r}: {seen[-60:]}")
