"use strict";
// Tables sort by a click on a title (a button, so the keyboard reaches it); rows without a value stay last.
for (const table of document.querySelectorAll("table.sortable")) {
  const body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.firstElementChild.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach((other) => other.setAttribute("aria-sort", "none"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const key = (row) => row.cells[column].dataset.sort ?? "";
    const rows = [...body.rows].sort((a, b) => {
      const [x, y] = [key(a), key(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const bySize = isNaN(x) || isNaN(y) ? x.localeCompare(y) : Number(x) - Number(y);
      return down ? -bySize : bySize;
    });
    body.append(...rows);
  }));
}
// A name or a curve under the pointer stands out from the others of its chart.
for (const figure of document.querySelectorAll("figure")) {
  for (const one of figure.querySelectorAll("[data-series]")) {
    one.addEventListener("pointerenter", () => {
      figure.classList.add("dim");
      for (const other of figure.querySelectorAll("[data-series]"))
        other.classList.toggle("lit", other.dataset.series === one.dataset.series);
    });
    one.addEventListener("pointerleave", () => figure.classList.remove("dim"));
  }
}
