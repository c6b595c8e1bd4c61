"use strict";
const filters = document.getElementById("filters");
const search = document.getElementById("search");
const chapter = document.getElementById("chapter");
const buttons = [...filters.querySelectorAll("[data-verdict]")];
const items = [...document.querySelectorAll(".item")].map((element) => ({
  element,
  text: element.textContent.toLowerCase(),
  chapter: element.dataset.chapter,
  verdicts: element.dataset.verdicts.split(" "),
}));
filters.hidden = false;

function counted(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function apply() {
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const wanted = buttons.filter((button) => button.ariaPressed === "true").map((button) => button.dataset.verdict);
  for (const item of items) {
    item.element.hidden = !(
      words.every((word) => item.text.includes(word)) &&
      (!chapter.value || item.chapter === chapter.value) &&
      (!wanted.length || item.verdicts.some((verdict) => wanted.includes(verdict)))
    );
  }
  for (const group of document.querySelectorAll("tbody.chapter")) {
    group.hidden = !group.querySelector(".item:not([hidden])");
  }
  for (const section of document.querySelectorAll("main > section")) {
    const all = section.querySelectorAll(".item").length;
    section.querySelector(".empty").hidden = !all || Boolean(section.querySelector(".item:not([hidden])"));
  }
  const requirements = document.querySelectorAll(".requirement:not([hidden])").length;
  const entries = document.querySelectorAll(".entry:not([hidden])").length;
  document.getElementById("shown").textContent = `${counted(requirements, "requirement")}, ${counted(entries, "result")} explained`;
}

function openTarget() {
  const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!target?.matches(".item")) {
    return;
  }
  if (target.hidden) {
    filters.reset();
    target.scrollIntoView();
  }
  if (target.matches(".entry")) {
    target.open = true;
    target.querySelector("summary").focus({ preventScroll: true });
    target.scrollIntoView();
  }
}

function step(by) {
  const shown = [...document.querySelectorAll(".entry:not([hidden]) > summary")];
  const at = shown.indexOf(document.activeElement);
  const next = shown[at < 0 ? (by > 0 ? 0 : shown.length - 1) : at + by];
  next?.focus();
  next?.scrollIntoView({ block: "nearest" });
}

filters.addEventListener("input", apply);
filters.addEventListener("submit", (event) => event.preventDefault());
filters.addEventListener("reset", () => {
  for (const button of buttons) {
    button.ariaPressed = "false";
  }
  search.value = "";
  chapter.value = "";
  apply();
});
for (const button of buttons) {
  button.addEventListener("click", () => {
    button.ariaPressed = String(button.ariaPressed !== "true");
    apply();
  });
}
document.addEventListener("keydown", (event) => {
  const typing = event.target.matches("input, select, textarea");
  if (event.ctrlKey || event.metaKey || event.altKey) {
    return;
  }
  if (event.key === "Escape" && event.target === search) {
    filters.reset();
    search.blur();
  } else if (event.key === "/" && !typing) {
    event.preventDefault();
    search.focus();
  } else if ((event.key === "j" || event.key === "k") && !typing) {
    step(event.key === "j" ? 1 : -1);
  }
});
addEventListener("hashchange", openTarget);
apply();
openTarget();
