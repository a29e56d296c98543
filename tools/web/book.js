// What does not fit the screen: equations shrink a little and then scroll, tables turn into a block a row.
(() => {
  const SMALLEST = 0.7;  // of an equation's usual size

  function fitEquations() {
    for (const math of document.querySelectorAll(".bd-article mjx-container")) {
      const display = math.getAttribute("display") === "true";
      const box = (display && math.closest("div.math")) || math.closest("p, li, td, dd") || math.parentElement;
      const scrolling = display ? box : math;
      math.style.fontSize = "";
      scrolling.classList.remove("scrolls");
      const parts = [math, ...math.querySelectorAll("mjx-math, mjx-mtable")];  // a numbered one is wider than its formula
      const wide = () => Math.max(...parts.map((part) => Math.max(part.getBoundingClientRect().width, part.scrollWidth)));
      const room = box.clientWidth;
      if (!room || wide() <= room + 1) continue;
      math.style.fontSize = `${Math.max(SMALLEST, (0.98 * room) / wide()) * 100}%`;
      if (wide() > room + 1) {
        scrolling.classList.add("scrolls");
        scrolling.tabIndex = 0;
      }
    }
  }

  function fitTables() {
    for (const table of document.querySelectorAll(".bd-article table:not(.interactive table)")) {
      table.classList.remove("stacked");
      const box = table.parentElement, heads = [...table.querySelectorAll("thead th")].map((head) => head.textContent.trim());
      const wide = table.getBoundingClientRect().width > box.clientWidth + 1;
      if (!wide || !heads.length || table.querySelector("[colspan], [rowspan]")) continue;
      for (const row of table.tBodies[0].rows)
        [...row.cells].forEach((cell, i) => (cell.dataset.label = heads[i] || ""));
      table.classList.add("stacked");
    }
  }

  let last = 0;
  function fit() {
    fitTables();
    fitEquations();
    document.documentElement.dataset.fitted = "true";
  }
  function start() {
    const typeset = window.MathJax && window.MathJax.startup && window.MathJax.startup.promise;
    if (document.querySelector(".math") && !typeset) return setTimeout(start, 50);
    Promise.resolve(typeset).then(fit);
  }
  window.addEventListener("load", start);
  window.addEventListener("resize", () => {
    if (window.innerWidth !== last) fit();
    last = window.innerWidth;
  });
})();
