"use strict";
// Sort tables by a click on a heading; without scripts the tables are static.
for (const table of document.querySelectorAll("table")) {
  const body = table.tBodies[0];
  const rows = [...body.rows];
  [...table.tHead.rows[0].cells].forEach((head, column) => {
    const key = (row) => row.cells[column].dataset.key;
    const values = rows.map(key).filter((text) => text !== "");
    const numeric = values.length > 0 && values.every((text) => Number.isFinite(Number(text)));
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
        // Missing values come last in both orders.
        if (x === "" || y === "") return (x === "") - (y === "");
        return down ? compare(y, x) : compare(x, y);
      });
      body.append(...sorted);
    });
  });
}
