"""Opens a page in Firefox and prints the text of one element: `python firefox.py URL SELECTOR LOG`.

A process of its own, because what drives Firefox leaves sockets to the garbage collector.
"""

from __future__ import annotations

import shutil
import sys

_TEXT = """const [selector, done] = arguments;
const look = () => document.documentElement.dataset.ready
  ? done(document.querySelector(selector).textContent) : setTimeout(look, 20);
look();"""


def main(url: str, selector: str, log: str) -> None:
    """Print the element's text once the page is drawn."""
    from marionette_driver.marionette import Marionette  # warns when imported, as pytest does to find doctests

    path = shutil.which("firefox-esr") or shutil.which("firefox")
    assert path is not None, "Firefox is not installed: apt-get install firefox-esr"
    firefox = Marionette(bin=path, headless=True, gecko_log=log)
    firefox.start_session()
    try:
        firefox.navigate(url)
        print(firefox.execute_async_script(_TEXT, script_args=[selector]))
    finally:
        firefox.quit()
        firefox.cleanup()


if __name__ == "__main__":
    main(*sys.argv[1:])
