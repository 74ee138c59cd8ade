"""Lay out the tables of the real sites in ``runs/sites``, where the experiments of this folder read them.

    FEDSTRATA_DATA=... python experiments/sites/tables.py

The data directory has ``sites/`` with the files as their owners publish them: ``heart-disease`` (UCI), ``gusto``
(GUSTO-I) and ``eicu-demo`` (eICU Collaborative Research Database demo 2.0). Those of heart disease and GUSTO are copied
as they are. The four files of eICU become one, with a row for the first stay of every patient: the stays of one patient
must not be divided among training and test rows.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pandas as pd

OUT = Path("runs/sites")
NUMBERS = (
    *("urine", "wbc", "temperature", "respiratoryrate", "sodium", "heartrate", "meanbp", "ph", "hematocrit"),
    *("creatinine", "albumin", "pao2", "pco2", "bun", "glucose", "bilirubin", "fio2", "eyes", "motor", "verbal"),
)
"""The worst values of the first day, of ``apacheapsvar``."""

FLAGS = ("intubated", "vent", "dialysis")
HISTORY = ("hepaticfailure", "metastaticcancer", "leukemia", "immunosuppression", "cirrhosis", "diabetes")
"""Diseases that a patient had before, of ``apachepredvar``."""


def eicu(folder: Path) -> pd.DataFrame:
    """Return the first stay of every patient who has APACHE variables: hospital, what was measured, and death."""
    stays = pd.read_csv(folder / "patient.csv.gz", dtype={"age": str})
    acute = pd.read_csv(folder / "apacheapsvar.csv.gz", usecols=["patientunitstayid", *NUMBERS, *FLAGS])
    wanted = ["patientunitstayid", "electivesurgery", "diedinhospital", *HISTORY]
    joined = stays.merge(acute, on="patientunitstayid", validate="1:1")
    joined = joined.merge(pd.read_csv(folder / "apachepredvar.csv.gz", usecols=wanted), on="patientunitstayid")
    joined = joined.sort_values(["hospitaldischargeyear", "unitvisitnumber", "patientunitstayid"])
    joined = joined.drop_duplicates("uniquepid")
    table = joined[["hospitalid", "gender", *NUMBERS, *FLAGS, *HISTORY, "diedinhospital"]].copy()
    table.insert(1, "age", joined["age"].replace("> 89", "90"))
    surgery = joined["electivesurgery"].map({1.0: "elective", 0.0: "emergency"})
    table.insert(3, "surgery", surgery.fillna("none"))
    return table.sort_values("hospitalid", kind="stable")


def main() -> None:
    """Write the tables."""
    source = Path(os.environ.get("FEDSTRATA_DATA", Path.home() / ".cache" / "fedstrata")) / "sites"
    OUT.mkdir(parents=True, exist_ok=True)
    for file in [*sorted((source / "heart-disease").glob("processed.*.data")), source / "gusto" / "gusto.csv.gz"]:
        shutil.copyfile(file, OUT / file.name)
        print(OUT / file.name)
    eicu(source / "eicu-demo").to_csv(OUT / "eicu.csv", index=False)
    print(OUT / "eicu.csv")


if __name__ == "__main__":
    main()
