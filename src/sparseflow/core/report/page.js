"use strict";
// Sorting is the only thing that needs a script: without one the tables are simply tables.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const key = (row) => row.cells[column].dataset.key;
    const given = rows.map(key).filter((text) => text !== "");
    const numeric = given.length > 0 && given.every((text) => Number.isFinite(Number(text)));
    if (numeric) for (const cell of [head, ...rows.map((row) => row.cells[column])]) cell.classList.add("number");
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const compare = (a, b) => (numeric ? Number(a) - Number(b) : a.localeCompare(b));
      const sorted = [...rows].sort((a, b) => {
        const x = key(a), y = key(b);
        // What is missing stands last, whichever way the rest is sorted.
        if (x === "" || y === "") return (x === "") - (y === "");
        return down ? compare(y, x) : compare(x, y);
      });
      body.append(...sorted);
    });
  });
}
