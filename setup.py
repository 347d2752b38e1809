"""Finds the packages of the wheel; pyproject.toml cannot find those whose folder has another name (envs, configs)."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["gspo_gym", "gspo_gym.*"]),
        "gspo_gym_configs",
        "gspo_gym_envs",
        *(f"gspo_gym_envs.{name}" for name in find_packages("envs")),
    ]
)
