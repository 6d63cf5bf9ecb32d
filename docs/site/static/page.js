// What scrolls sideways can be scrolled by keyboard; what is folded is printed.
const WIDE = "pre, .table-wrapper, div.math";
function reach() {
  for (const box of document.querySelectorAll(WIDE)) {
    if (box.scrollWidth > box.clientWidth || box.scrollHeight > box.clientHeight + 1) box.tabIndex = 0;
    else box.removeAttribute("tabindex");
  }
}
addEventListener("load", reach);
addEventListener("resize", reach);
document.addEventListener("toggle", reach, true);

let opened = [];
addEventListener("beforeprint", () => {
  opened = [...document.querySelectorAll("details:not([open])")];
  for (const fold of opened) fold.open = true;
});
addEventListener("afterprint", () => { for (const fold of opened) fold.open = false; });
