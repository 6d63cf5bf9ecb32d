// The planner's page: its sliders ask the worker, which asks the package.
const form = document.getElementById("planner");
const start = document.getElementById("planner-start");
const said = document.getElementById("planner-said");
const controls = form.querySelector("fieldset");
const refusal = document.getElementById("planner-refused");
const places = { one: document.getElementById("planner-picture"), best: document.getElementById("planner-best") };
const scripts = document.currentScript.src;
let worker, busy = false, waiting = null;

function settings() {
  const given = {};
  for (const { name, value, dataset } of form.querySelectorAll("select, input")) {
    given[name] = dataset.as === "power" ? 2 ** value : dataset.as === "text" ? value : Number(value);
    const shown = form.querySelector(`output[for="${name}"]`);
    if (!shown) continue;
    shown.textContent = given[name];
    form.elements[name].setAttribute("aria-valuetext", given[name]);
  }
  return given;
}

// One question at a time; of those asked meanwhile only the last counts.
function ask(question) {
  if (busy) { waiting = question; return; }
  busy = true;
  worker.postMessage(question);
}

// What is not the answer to the settings as they stand is grey.
function show({ refused, html, values, best }) {
  const place = best ? places.best : places.one;
  refusal.textContent = refused ?? "";
  refusal.hidden = !refused;
  place.classList.toggle("old", Boolean(refused || waiting));
  if (refused) places.best.classList.add("old");
  if (html) place.innerHTML = html;
  form.dataset.values = JSON.stringify(values ?? { refused });
}

function fail(words) {
  controls.disabled = true;
  said.textContent = `Python did not start: ${words}`;
}

start.addEventListener("click", () => {
  if (location.protocol === "file:") return fail("open the site through a server, python -m http.server -d build/site");
  start.disabled = true;
  said.textContent = "Loading Python …";
  const late = setTimeout(() => fail("no answer after two minutes"), 120000);
  worker = new Worker(new URL("worker.js", scripts), { type: "module" });
  worker.onerror = (event) => fail(event.message ?? "its worker stopped");
  worker.onmessage = ({ data }) => {
    if (data.failed) return fail(data.failed);
    busy = false;
    if (data.ready) {
      clearTimeout(late);
      start.hidden = true;
      controls.disabled = false;
      said.textContent = "";
      ask(settings());
    } else {
      show(data);
    }
    if (waiting) { const next = waiting; waiting = null; ask(next); }
  };
});
for (const moved of ["input", "change"]) {
  form.addEventListener(moved, () => { for (const place of Object.values(places)) place.classList.add("old"); ask(settings()); });
}
form.addEventListener("submit", (event) => { event.preventDefault(); ask({ ...settings(), best: true }); });
settings();
