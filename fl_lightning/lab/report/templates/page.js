// A click on a column's head sorts by it: by what cells are worth where they are worth something, else by their text.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => head.querySelector("button").addEventListener("click", () => {
    const before = head.getAttribute("aria-sort");
    const down = column > 0 ? before !== "descending" : before === "ascending"; // highest first, names from A
    const key = (row) => row.cells[column].dataset.value;
    const rows = [...table.tBodies[0].rows].sort((a, b) => {
      if (key(a) === undefined || key(b) === undefined) {
        if (key(a) !== key(b)) return key(a) === undefined ? 1 : -1; // what has no value stays below
        return (down ? -1 : 1) * a.cells[column].textContent.localeCompare(b.cells[column].textContent, "en", { numeric: true });
      }
      return (down ? -1 : 1) * (Number(key(a)) - Number(key(b)));
    });
    heads.forEach((other) => other.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    table.tBodies[0].append(...rows);
  }));
}
