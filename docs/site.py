"""What the site (mkdocs.yml) has besides the pages in docs/: the rooms' READMEs, and the reference of the Python names.

A hook of mkdocs. Links are written for readers of the repository, relative to the file; here one to a page of the site
leads there, and one to any other file to the repository.
"""

import importlib
import posixpath
import re
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOMS = {
    **{
        f"rooms/{room}.md": f"gspo_gym/{room}/README.md"
        for room in ("env", "chat", "engine", "learning", "run", "judge", "remote", "cluster")
    },
    "rooms/configs.md": "configs/README.md",
    "rooms/recipes.md": "configs/recipes/README.md",
}
FIGURES = {
    f"figures/{path.name}": path for path in sorted((ROOT / "examples" / "figures").iterdir()) if path.suffix != ".md"
}
LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)(#[^)\s]*)?(?=\))")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Take the repository's address from where it stands."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    config.repo_url, config.repo_name = project["urls"]["Repository"], project["name"]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the rooms' pages, the figures, and the page of the Python names."""
    for page, source in ROOMS.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    for name, path in FIGURES.items():
        files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have the links of a page lead to pages of the site where it has them."""
    uri = page.file.src_uri
    if uri == "api.md":
        return markdown
    pages = {source: name for name, source in ROOMS.items()}
    pages |= {path.relative_to(ROOT).as_posix(): name for name, path in FIGURES.items()}
    pages |= {f"docs/{file.src_uri}": file.src_uri for file in files if file.src_uri not in (*ROOMS, *FIGURES)}
    pages["README.md"] = "index.md"
    folder = posixpath.dirname(ROOMS.get(uri, f"docs/{uri}"))

    def lead(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target in pages:
            return posixpath.relpath(pages[target], posixpath.dirname(uri) or ".") + (link[2] or "")
        if not (ROOT / target).exists():
            return link[0]  # mkdocs says that it leads nowhere
        return f"{config.repo_url}/blob/main/{target}{link[2] or ''}"

    return LINK.sub(lead, markdown)


def api_page() -> str:
    """Return the page of all public names, in the groups of their homes.

    Raises:
        PluginError: one of them has no docstring.
    """
    package = importlib.import_module("gspo_gym")
    groups: dict[str, list[str]] = {}
    for name, home in package._HOMES.items():
        if not (getattr(package, name).__doc__ or "").strip():
            raise PluginError(f"gspo_gym.{name} has no docstring")
        groups.setdefault(home.partition(".")[0], []).append(f"::: gspo_gym.{home}.{name}")
    titles = {"env": "Environments", "types": "Messages", "config": "Configuration", "cli": "Train, evaluate, look",
              "rollout": "Episodes", "engine": "Engines", "policy": "Models", "remote": "Agents",
              "run": "Runs"}  # fmt: skip
    lines = ["# Python", "", "All public names of `import gspo_gym`.", ""]
    for room, entries in groups.items():
        lines += [f"## {titles[room]}", "", *(f"{entry}\n" for entry in entries)]
    return "\n".join(lines)
